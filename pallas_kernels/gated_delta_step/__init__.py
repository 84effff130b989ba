"""Decoding with Gated DeltaNet; see README.md beside this file for the maths."""

from pallas_kernels.gated_delta_step.api import (
    choose,
    gated_delta_commit,
    gated_delta_step,
    gated_delta_verify,
)
from pallas_kernels.gated_delta_step.layer import Layer, Pending


__all__ = [
    "Layer",
    "Pending",
    "choose",
    "gated_delta_commit",
    "gated_delta_step",
    "gated_delta_verify",
]

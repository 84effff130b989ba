"""One matrix product per expert over sorted rows; see README.md beside this file."""

from pallas_kernels.grouped_matmul.api import choose, grouped_matmul
from pallas_kernels.grouped_matmul.mlp import choose_mlp, grouped_mlp
from pallas_kernels.grouped_matmul.pieces import (
    ActivationGradient,
    activated_product,
    activation_gradient,
    choose_activation_gradient,
    choose_weight_gradient,
    weight_gradient,
)


__all__ = [
    "ActivationGradient",
    "activated_product",
    "activation_gradient",
    "choose",
    "choose_activation_gradient",
    "choose_mlp",
    "choose_weight_gradient",
    "grouped_matmul",
    "grouped_mlp",
    "weight_gradient",
]

"""Which implementation of which op a model runs, as one hashable setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


OPS = (
    "attention",
    "causal_conv1d",
    "decode_attention",
    "engram_gate",
    "engram_gather",
    "engram_hash",
    "expert_gemv",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_delta_verify",
    "gemv",
    "gemv_chain",
    "grouped_matmul",
    "host_gather",
    "rms_norm",
    "rope_append",
    "sort_dispatch",
    "ssd",
    "ssd_step",
)
_ALLOWED = ("reference", "xla", "mosaic")

# `None`: every op picks for itself. A name: every op runs that one. Pairs of
# (op, name): those ops run what is named, the rest pick for themselves.
Implementations = None | str | tuple[tuple[str, str], ...]


def normalize(setting: str | Mapping[str, str] | Any | None) -> Implementations:
    """Checks a setting and makes it hashable.

    Args:
      setting: `None`, one implementation's name, or op -> name (a mapping, or pairs).

    Returns:
      The same setting, with a mapping turned into sorted pairs.

    Raises:
      ValueError: an op or an implementation is unknown.
    """
    if setting is None:
        return None
    if isinstance(setting, str):
        _check_name(setting)
        return setting
    pairs = tuple(sorted(dict(setting).items()))
    for op, name in pairs:
        if op not in OPS:
            raise ValueError(
                f"implementation: no op {op!r}, allowed are {', '.join(OPS)}"
            )
        _check_name(name)
    if "gemv_chain" in dict(pairs) and "gemv" not in dict(pairs):
        raise ValueError(
            "implementation: gemv_chain is named without gemv, whose products it joins"
        )
    return pairs


def implementation_of(op: str, setting: Implementations) -> Any:
    """Returns the name to pass to `op` as `implementation=`, `None` for its choice."""
    if setting is None or isinstance(setting, str):
        return setting
    return dict(setting).get(op)


def _check_name(name: str) -> None:
    if name not in _ALLOWED:
        raise ValueError(
            f"implementation={name!r} is unknown, allowed are "
            f"{', '.join(map(repr, _ALLOWED))} and None"
        )

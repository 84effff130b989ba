"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.attention import reference, xla
from pallas_kernels.attention.config import heuristic


_AVAILABLE: tuple[Implementation, ...] = ("xla", "reference")


def choose(
    *args: Any, implementation: Implementation | None = None, **options: Any
) -> Choice:
    """Says what a call of `attention` would run.

    Args:
      *args: arrays or `jax.ShapeDtypeStruct`, as for `attention`.
      implementation: the one asked for.
      **options: the other keywords of `attention`.

    Returns:
      The choice.
    """
    del args, options  # Both implementations run everything that passes the checks.
    return select("attention", implementation, {}, available=_AVAILABLE)


def _check_pair(
    q_name: str,
    q_ids: jax.Array | None,
    kv_name: str,
    kv_ids: jax.Array | None,
    batch: int,
    time: int,
    length: int,
) -> None:
    if (q_ids is None) != (kv_ids is None):
        given, missing = (q_name, kv_name) if kv_ids is None else (kv_name, q_name)
        raise ValueError(f"{given} is given without {missing}, expected both or none")
    expected = ((q_name, q_ids, (batch, time)), (kv_name, kv_ids, (batch, length)))
    for name, ids, shape in expected:
        if ids is None:
            continue
        if ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"{name} is {ids.dtype}{list(ids.shape)}, expected int{list(shape)}"
            )


def _check_qkv(q: Any, k: Any, v: Any, sinks: Any) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"q, k and v have shapes {q.shape}, {k.shape} and {v.shape}, expected "
            "four axes each"
        )
    if k.shape != (q.shape[0], k.shape[1], k.shape[2], q.shape[3]):
        raise ValueError(
            f"k has shape {k.shape}, expected [{q.shape[0]}, S, G, {q.shape[3]}] as q "
            f"has shape {q.shape}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {v.shape}, expected {list(k.shape[:3])} + [V]")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, which is no multiple of the {k.shape[2]} "
            "heads of k"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}, expected one"
        )
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ValueError(f"sinks has shape {sinks.shape}, expected ({q.shape[2]},)")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Softmax attention with grouped kv heads over packed or cached rows.

    A query sees a key if all of this holds: both have the same segment id and it is
    not 0 (if ids are given); the key is not later (if `causal`); query - key < window
    (if given); the key's position is not negative (if positions are given). Places
    are compared by positions if given, else by index.

    Args:
      q: [B, T, H, K].
      k: [B, S, G, K]; query head h reads kv head h // (H / G).
      v: [B, S, G, V].
      q_segment_ids, kv_segment_ids: i32[B, T] and i32[B, S], both or none.
      q_positions, kv_positions: i32[B, T] and i32[B, S], both or none; -1 marks an
        empty slot of a cache.
      causal: whether later keys are hidden.
      window: how many places back a query sees, itself included.
      sinks: f32[H], a logit per head that takes weight and gives no value (gpt-oss).
      logit_cap: c in c tanh(logit / c).
      scale: factor on the logits, K ** -0.5 if `None`.
      implementation: "xla", "reference" or `None`.

    Returns:
      [B, T, H, V] of q's dtype, exactly 0 for a query that sees nothing. The softmax
      is f32.

    Raises:
      ValueError: a shape, dtype or option is not allowed.
    """
    choice = choose(q, k, v, implementation=implementation)
    _check_qkv(q, k, v, sinks)
    batch, time = q.shape[:2]
    length = k.shape[1]
    sizes = (batch, time, length)
    _check_pair(
        "q_segment_ids", q_segment_ids, "kv_segment_ids", kv_segment_ids, *sizes
    )
    _check_pair("q_positions", q_positions, "kv_positions", kv_positions, *sizes)
    if q_positions is None and (causal or window is not None) and time != length:
        raise ValueError(
            f"q has {time} and k {length} places; expected q_positions and "
            "kv_positions, or equal lengths, for a causal or windowed mask"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected at least 1")
    if logit_cap is not None and logit_cap <= 0:
        raise ValueError(f"logit_cap is {logit_cap}, expected more than 0")
    options = {
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "causal": causal,
        "window": window,
        "sinks": sinks,
        "logit_cap": logit_cap,
        "scale": q.shape[3] ** -0.5 if scale is None else scale,
    }
    if choice.implementation == "reference":
        return reference.attention(q, k, v, **options)
    return xla.attention(q, k, v, **options, config=heuristic(time=time))

"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.attention import config_mosaic, reference, xla
from pallas_kernels.attention.config import heuristic
from pallas_kernels.attention.tiles import TileBounds, tile_bounds


def choose(
    q: Any,
    k: Any,
    v: Any,
    *,
    q_positions: Any = None,
    scale: float | None = None,
    config: config_mosaic.Config | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `attention` would run.

    Args:
      q, k, v: arrays or `jax.ShapeDtypeStruct`, as for `attention`.
      q_positions, scale, config: as for `attention`.
      implementation: the one asked for.
      **options: the other keywords of `attention`.

    Returns:
      The choice.

    Raises:
      ValueError: `config` is given and an implementation that has none is named.
      NotImplementedError: the named implementation cannot run this call.
    """
    del options  # "xla" and "reference" run everything that passes the checks.
    if config is not None and implementation in ("xla", "reference"):
        raise ValueError(
            f'config={config} is for "mosaic", implementation={implementation!r} has '
            "none"
        )
    refused = {}
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := config_mosaic.refusal(
        time=q.shape[1],
        length=k.shape[1],
        heads=q.shape[2],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=q.dtype,
        scale=scale,
        has_positions=q_positions is not None,
    ):
        refused["mosaic"] = reason
    if not refused and config is None:
        config = config_mosaic.pick(head_dim=q.shape[3])
    return select("attention", implementation, refused, config=config)


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


def _check_mask(
    q: Any,
    k: Any,
    *,
    causal: bool,
    window: int | None,
    q_positions: Any,
    is_prefix: Any,
) -> None:
    time, length = q.shape[1], k.shape[1]
    if q_positions is None and (causal or window is not None) and time != length:
        raise ValueError(
            f"q has {time} and k {length} places; expected q_positions and "
            "kv_positions, or equal lengths, for a causal or windowed mask"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected at least 1")
    if is_prefix is None:
        return
    if not causal:
        raise ValueError("is_prefix is given without causal, which hides no key")
    expected = (k.shape[0], length)
    if is_prefix.shape != expected or is_prefix.dtype != jnp.bool_:
        raise ValueError(
            f"is_prefix is {is_prefix.dtype}{list(is_prefix.shape)}, expected "
            f"bool{list(expected)}"
        )


def _check_bounds(
    bounds: TileBounds, q: Any, k: Any, causal: bool, window: int | None
) -> None:
    """Refuses bounds of another mask, as far as shapes and options tell."""
    built = (
        (bounds.key_start.shape[0], bounds.time, bounds.length),
        bounds.causal,
        bounds.window,
    )
    called = ((q.shape[0], q.shape[1], k.shape[1]), causal, window)
    for name, a, b in zip(
        ("[B, T, S]", "causal", "window"), built, called, strict=True
    ):
        if a != b:
            raise ValueError(f"bounds were built for {name} = {a}, this call has {b}")


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
    is_prefix: jax.Array | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    scale: float | None = None,
    bounds: Any = None,
    config: config_mosaic.Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Softmax attention with grouped kv heads over packed or cached rows.

    A query sees a key if all of this holds: both have the same segment id and it is
    not 0 (if ids are given); the key is not later or is in a prefix (if `causal`);
    query - key < window (if given); the key's position is not negative (if positions
    are given). Places are compared by positions if given, else by index.

    Args:
      q: [B, T, H, K].
      k: [B, S, G, K]; query head h reads kv head h // (H / G).
      v: [B, S, G, V].
      q_segment_ids, kv_segment_ids: i32[B, T] and i32[B, S], both or none.
      q_positions, kv_positions: i32[B, T] and i32[B, S], both or none; -1 marks an
        empty slot of a cache.
      causal: whether later keys are hidden.
      window: how many places back a query sees, itself included.
      is_prefix: bool[B, S], keys that queries before them see too (prefix language
        models); "mosaic" has them at the start of their document only, and gives
        NaN for a row where they are elsewhere.
      sinks: f32[H], a logit per head that takes weight and gives no value (gpt-oss).
      logit_cap: c in c tanh(logit / c).
      scale: factor on the logits, K ** -0.5 if `None`.
      bounds: the `TileBounds` that `tile_bounds` made of the mask, so that layers
        share it. "mosaic" takes the mask from there and from nowhere else, and makes
        it if `None`; the others take the mask from the arguments above.
      config: launch parameters of "mosaic"; `None` for those of the head dim. Where
        `bounds` are given, the blocks are theirs.
      implementation: "mosaic", "xla", "reference" or `None`.

    Returns:
      [B, T, H, V] of q's dtype, exactly 0 for a query that sees nothing. The softmax
      is f32. A row of segment ids or prefixes that "mosaic" cannot run (see
      `tile_bounds`) is NaN there.

    Raises:
      ValueError: a shape, dtype or option is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: FlashAttention-2 and -3 (arXiv 2307.08691 and 2407.08608) for "mosaic".
    """
    return attention_with_lse(
        *(q, k, v),
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_positions=q_positions,
        kv_positions=kv_positions,
        causal=causal,
        window=window,
        is_prefix=is_prefix,
        sinks=sinks,
        logit_cap=logit_cap,
        scale=scale,
        bounds=bounds,
        config=config,
        implementation=implementation,
    )[0]


def attention_with_lse(
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
    is_prefix: jax.Array | None = None,
    sinks: jax.Array | None = None,
    logit_cap: float | None = None,
    scale: float | None = None,
    bounds: Any = None,
    config: config_mosaic.Config | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`attention`, and the logarithm of what its softmax divides by.

    Arguments and errors are those of `attention`.

    Returns:
      [B, T, H, V] as from `attention`; f32[B, T, H], the natural logarithm of each
      query's sum of exp(logit), its sink included, -inf for an empty sum. Both can be
      differentiated.
    """
    _check_qkv(q, k, v, sinks)
    batch, time = q.shape[:2]
    length = k.shape[1]
    sizes = (batch, time, length)
    _check_pair(
        "q_segment_ids", q_segment_ids, "kv_segment_ids", kv_segment_ids, *sizes
    )
    _check_pair("q_positions", q_positions, "kv_positions", kv_positions, *sizes)
    mask: dict[str, Any] = {"causal": causal, "window": window, "is_prefix": is_prefix}
    _check_mask(q, k, q_positions=q_positions, **mask)
    if bounds is not None:
        _check_bounds(bounds, q, k, causal, window)
    if logit_cap is not None and logit_cap <= 0:
        raise ValueError(f"logit_cap is {logit_cap}, expected more than 0")
    choice = choose(
        *(q, k, v),
        q_positions=q_positions,
        scale=scale,
        config=config,
        implementation=implementation,
    )
    ids: dict[str, Any] = {
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
    }
    options: dict[str, Any] = {
        "sinks": sinks,
        "logit_cap": logit_cap,
        "scale": q.shape[3] ** -0.5 if scale is None else scale,
    }
    if choice.implementation == "mosaic":
        # Mosaic GPU takes a second to import, which CPU users need not pay.
        from pallas_kernels.attention import mosaic

        if bounds is None:
            bounds = tile_bounds(
                batch=batch,
                time=time,
                length=length,
                block_q=choice.config.block_q,
                block_kv=choice.config.block_kv,
                **ids,
                **mask,
            )
        return mosaic.attention(q, k, v, **options, bounds=bounds, config=choice.config)
    options |= mask | ids
    options |= {"q_positions": q_positions, "kv_positions": kv_positions}
    if choice.implementation == "reference":
        return reference.attention(q, k, v, **options)
    return xla.attention(q, k, v, **options, config=heuristic(time=time))

"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels._common.forward_only import forward_only
from pallas_kernels.sparse_decode_attention import config as configs
from pallas_kernels.sparse_decode_attention import reference, xla
from pallas_kernels.sparse_decode_attention.held import Held, Rotary


MEASURED_DIM = 128  # K of the rows


def choose(
    q: Any,
    held: Any,
    ids: Any,
    slots: Any,
    count: Any,
    *,
    rotary: Rotary | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
    sinks: Any = None,
    layer: Any = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `sparse_decode_attention` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    sizes = _check(q, held, ids, slots, count, rotary, logit_cap, sinks, layer)
    refused, config = {}, None
    floats = (held.a, held.basis, held.values, held.out_k, held.out_v)
    floats = (q, *floats, held.ring_k, held.ring_v)
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(sizes, tuple(x.dtype for x in floats), scale):
        refused["mosaic"] = reason
    else:
        config = configs.heuristic(sizes)
    only_named = {}
    if (dim := q.shape[-1]) != MEASURED_DIM:
        only_named["mosaic"] = f"no measured row speaks for K = {dim} yet"
    return select(
        "sparse_decode_attention",
        implementation,
        refused,
        only_named=only_named,
        config=config,
    )


def _expect(name: str, array: Any, shape: tuple[int, ...], dtype: Any = None) -> None:
    wrong = dtype is not None and array.dtype != dtype
    if array.shape != shape or wrong:
        kind = "" if dtype is None else jnp.dtype(dtype).name
        raise ValueError(
            f"{name} is {array.dtype}{list(array.shape)}, expected {kind}{list(shape)}"
        )


def _check(
    q: Any,
    held: Any,
    ids: Any,
    slots: Any,
    count: Any,
    rotary: Rotary | None,
    logit_cap: float | None,
    sinks: Any,
    layer: Any,
) -> configs.Sizes:
    """Checks shapes and dtypes; the sizes of the call."""
    for name, array, rank in (
        ("q", q, 3),
        ("ids", ids, 3),
        ("basis", held.basis, 4),
        ("ring_k", held.ring_k, 4),
    ):
        if len(array.shape) != rank:
            raise ValueError(
                f"{name} has shape {list(array.shape)}, expected {rank} axes"
            )
    more = 0 if layer is None else 1
    for name, rank in (("a", 4), ("values", 4), ("out_k", 5), ("out_v", 5)):
        array = getattr(held, name)
        if len(array.shape) != rank + more:
            raise ValueError(
                f"{name} has shape {list(array.shape)}, expected {rank + more} axes "
                f"with{'out' if layer is None else ''} layer"
            )
    batch, heads, width = q.shape
    groups, chosen = ids.shape[1:]
    if heads % groups:
        raise ValueError(
            f"{heads} query heads are no multiple of the {groups} kv heads"
        )
    layers = held.a.shape[:more]
    chunks, chunk, rank = held.a.shape[more + 1 :]
    places, outliers = held.values.shape[more + 2], held.out_k.shape[more + 2]
    ring = held.ring_k.shape[2]
    pair = (batch, groups)
    out = (*layers, *pair, outliers, chunk, width)
    _expect("a", held.a, (*layers, batch, chunks, chunk, rank))
    _expect("basis", held.basis, (*pair, width, rank))
    _expect("first", held.first, (batch, chunks), jnp.int32)
    _expect("values", held.values, (*layers, *pair, places, chunk * width))
    _expect("out_k", held.out_k, out)
    _expect("out_v", held.out_v, out)
    _expect("out_count", held.out_count, (batch,), jnp.int32)
    _expect("ring_k", held.ring_k, (*pair, ring, width))
    _expect("ring_v", held.ring_v, (*pair, ring, width))
    _expect("ring_valid", held.ring_valid, (batch, ring), jnp.bool_)
    _expect("ids", ids, (*pair, chosen), jnp.int32)
    _expect("slots", slots, (*pair, chosen), jnp.int32)
    _expect("count", count, pair, jnp.int32)
    if sinks is not None:
        _expect("sinks", sinks, (heads,))
    if layer is not None:
        _expect("layer", layer, (), jnp.int32)
    if rotary is not None and 2 * len(rotary.frequencies) != width:
        raise ValueError(
            f"rotary has {len(rotary.frequencies)} frequencies, expected K / 2 = "
            f"{width // 2}"
        )
    if logit_cap is not None and logit_cap <= 0:
        raise ValueError(f"logit_cap={logit_cap} must be positive or None")
    return configs.Sizes(
        batch=batch,
        heads=heads,
        kv_heads=groups,
        head_dim=width,
        rank=rank,
        chunk=chunk,
        chunks=chunks,
        chosen=chosen,
        places=places,
        outliers=outliers,
        ring=ring,
    )


def sparse_decode_attention(
    q: jax.Array,
    held: Held,
    ids: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    *,
    rotary: Rotary | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
    sinks: jax.Array | None = None,
    layer: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one token a row over chosen chunks, outliers and the newest tokens.

    Keys of chosen chunks are a basis^T, rotated by their positions and rounded to the
    dtype of the others. What does not count may hold anything. "mosaic" has no
    gradient.

    Args:
      q: [B, H, K], after the rotary embedding; query head h reads kv head h // (H / G).
      held: what the rows hold.
      ids: i32[B, G, N], chosen chunks.
      slots: i32[B, G, N], where in `held.values` the values of each are.
      count: i32[B, G], chosen chunks that count, the first ones.
      rotary: the rotary embedding, `None` for none.
      scale: factor on the scores; `None` is K^-1/2.
      logit_cap: scores become cap * tanh(score / cap); `None` for no cap.
      sinks: f32[H], a logit per head that takes weight and gives nothing, or `None`.
      layer: i32[], which of several layers' arrays of `held` is meant; less than 0 is
        0, and more than the last is the last.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can, and
        "mosaic" only where K is `MEASURED_DIM`.

    Returns:
      o f32[B, H, K], 0 where nothing counts, and f32[B, H], the logarithm of the sum of
      exp(score), -inf there.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call, or a gradient
        through "mosaic" is asked for.

    Source: ShadowKV (arXiv 2410.21465), section 4.2.
    """
    named: dict[str, Any] = {"rotary": rotary, "logit_cap": logit_cap}
    choice = choose(
        q,
        held,
        ids,
        slots,
        count,
        scale=scale,
        sinks=sinks,
        layer=layer,
        implementation=implementation,
        **named,
    )
    named["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
    if choice.implementation != "mosaic":
        module = xla if choice.implementation == "xla" else reference
        if layer is not None:  # the kernel does so itself
            layer = jnp.clip(layer, 0, held.a.shape[0] - 1)
        return module.sparse_decode_attention(
            q, held, ids, slots, count, sinks=sinks, layer=layer, **named
        )
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.sparse_decode_attention import kernel

    sizes = _check(q, held, ids, slots, count, rotary, logit_cap, sinks, layer)
    plan = kernel.Plan(
        sizes=sizes, dtype=jnp.dtype(q.dtype), config=choice.config, **named
    )
    launch = forward_only("sparse_decode_attention", kernel.sparse_decode_attention)
    return launch(plan, q, held, ids, slots, count, sinks, layer)

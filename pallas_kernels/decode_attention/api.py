"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels._common.forward_only import forward_only
from pallas_kernels.decode_attention import config as configs
from pallas_kernels.decode_attention import reference, xla
from pallas_kernels.decode_attention.held import Sizes, real_heads


_ONLY_NAMED = {"mosaic": "a row speaks for one size alone"}


def choose(
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    *,
    table: Any = None,
    layer: Any = None,
    heads_first: bool = False,
    heads: int | None = None,
    scale: float | None = None,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `decode_attention` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: `config` is given and an implementation that has none is named.
      NotImplementedError: the named implementation cannot run this call.
    """
    del v, lengths, options
    if config is not None and implementation in ("xla", "reference"):
        raise ValueError(
            f'config={config} is for "mosaic", implementation={implementation!r} has '
            "none"
        )
    sizes = _sizes(q, k, table, layer is not None, heads_first, heads)
    refused: dict[str, str] = {}
    reason = configs.refusal(sizes, q.dtype, scale)
    if not (hw.is_hopper() or interpret.is_interpreting()):
        reason = f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
    if reason is None:
        config = configs.pick(sizes) if config is None else config
        reason = config.refusal(sizes)
    if reason is not None:
        refused["mosaic"] = reason
    return select(
        "decode_attention",
        implementation,
        refused,
        only_named=_ONLY_NAMED,
        config=config,
    )


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    table: jax.Array | None = None,
    layer: jax.Array | None = None,
    heads_first: bool = False,
    heads: int | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    gate: jax.Array | None = None,
    logit_cap: float | None = None,
    scale: float | None = None,
    out_dtype: Any = None,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of each row's newest tokens over all that its cache holds.

    o = sum_s exp(a_s) v_s / (sum_s exp(a_s) + exp(sink)),   a_s = scale q . k_s

    A row's tokens stand in the slots 0, 1, ... of its cache, the T new ones last: query
    t of a row of n tokens is token n - T + t, and sees the tokens up to itself. What
    stands in other slots is never used, not even multiplied by 0.

    Args:
      q: [B, T, H, K].
      k: [B, S, G, K]; query head h reads kv head h // (H / G). With `table`, a pool of
        pages [P, page, G, K].
      v: like k.
      lengths: i32[B], tokens n that each row holds, the new ones included; less than
        0 is 0, and more than S is S.
      table: i32[B, N], the page of a row's tokens n page, ..., (n + 1) page - 1; S is
        N page then. A page outside the pool, such as -1, holds no token.
      layer: i32[], if k and v have a leading axis of layers, the one that is meant.
        Less than 0 is 0, and more than the last is the last. The kernel reads it where
        it is.
      heads: H, if q has more of them: of the heads that it has for each kv head the
        first H / G are meant. With `padded_group(H / G)` of them and T = 1 the kernel
        reads q where it is; of any other q it makes such a copy.
      heads_first: whether the heads stand before the tokens in k and v: [B, G, S, K],
        pages [P, G, page, K].
      window: how many places back a query sees, itself included.
      sinks: f32[H], a logit per head that takes weight and gives no value (gpt-oss).
      gate: [B, T, H, K], any float dtype; o is multiplied by its sigmoid (Qwen3-Next),
        in f32 after a rounding to `out_dtype`.
      logit_cap: c in c tanh(logit / c).
      scale: factor on the logits, K ** -0.5 if `None`.
      out_dtype: of o, q's if `None`; float32 for results that are merged.
      config: launch parameters of "mosaic"; `None` for those of these sizes.
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has K of 64, 128
        or 256, 16-bit dtypes, T up to 8, H / G up to 16; `None` does not take it yet.

    Returns:
      o [B, T, H, K], exactly 0 for a query that sees nothing; f32[B, T, H], the natural
      logarithm of each query's sum of exp(a), its sink included, -inf for an empty sum.
      Neither depends on other rows.

    Raises:
      ValueError: a shape, dtype or option is not allowed.
      NotImplementedError: the named implementation cannot run this call, or a gradient
        through "mosaic" is asked for.

    Source: Flash-Decoding (Dao et al. 2023) for the split over tokens; PagedAttention
    (arXiv 2309.06180), section 4.1, for the pages.
    """
    _check(q, k, v, lengths, table, layer, sinks, heads_first, heads, gate)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected at least 1")
    if logit_cap is not None and logit_cap <= 0:
        raise ValueError(f"logit_cap is {logit_cap}, expected more than 0")
    choice = choose(
        *(q, k, v, lengths),
        table=table,
        layer=layer,
        heads_first=heads_first,
        heads=heads,
        scale=scale,
        config=config,
        implementation=implementation,
    )
    sizes = _sizes(q, k, table, layer is not None, heads_first, heads)
    if layer is not None:
        layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, sizes.layers - 1)
    options: dict[str, Any] = {
        "sizes": sizes,
        "table": table,
        "layer": layer,
        "window": window,
        "sinks": sinks,
        "logit_cap": logit_cap,
        "scale": q.shape[3] ** -0.5 if scale is None else scale,
        "out_dtype": q.dtype if out_dtype is None else out_dtype,
    }
    lengths = jnp.asarray(lengths, jnp.int32)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.decode_attention import kernel

        launch = forward_only("decode_attention", kernel.decode_attention)
        return launch(q, k, v, lengths, gate=gate, **options, config=choice.config)
    lengths = jnp.clip(lengths, 0, sizes.length)
    run = reference if choice.implementation == "reference" else xla
    q = real_heads(q, sizes)
    o, lse = run.decode_attention(q, k, v, lengths, **options)
    if gate is not None:
        share = jax.nn.sigmoid(gate.astype(jnp.float32))
        o = (o.astype(jnp.float32) * share).astype(o.dtype)
    return o, lse


def _sizes(
    q: Any,
    k: Any,
    table: Any,
    stacked: bool,
    heads_first: bool,
    heads: int | None = None,
) -> Sizes:
    batch, time, queries, dim = q.shape
    heads = queries if heads is None else heads
    rows, first, second, _ = k.shape[-4:]
    kv_heads, tokens = (first, second) if heads_first else (second, first)
    return Sizes(
        batch=batch,
        time=time,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        length=tokens if table is None else table.shape[1] * tokens,
        page=0 if table is None else tokens,
        pages=0 if table is None else rows,
        layers=k.shape[0] if stacked else 0,
        heads_first=heads_first,
    )


def _check(
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    table: Any,
    layer: Any,
    sinks: Any,
    heads_first: bool,
    heads: int | None,
    gate: Any,
) -> None:
    """Checks a call's shapes and dtypes."""
    rank = 4 if layer is None else 5
    if q.ndim != 4 or k.ndim != rank:
        raise ValueError(
            f"q and k have shapes {q.shape} and {k.shape}, expected 4 and {rank} axes"
        )
    if v.shape != k.shape:
        raise ValueError(f"v has shape {v.shape}, expected that of k, {k.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}, expected one"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has dtype {q.dtype}, expected a floating one")
    sizes = _sizes(q, k, None, layer is not None, heads_first, heads)
    if k.shape[-1] != sizes.head_dim:
        raise ValueError(
            f"k has shape {k.shape}, expected {sizes.head_dim} at its end as q has "
            f"shape {q.shape}"
        )
    if sizes.kv_heads < 1 or sizes.heads % sizes.kv_heads:
        raise ValueError(
            f"q has {sizes.heads} heads, which is no multiple of the {sizes.kv_heads} "
            "heads of k"
        )
    if not 1 <= sizes.heads <= q.shape[2] or q.shape[2] % sizes.kv_heads:
        raise ValueError(
            f"heads is {heads}, expected at most the {q.shape[2]} of q, which are as "
            f"many for each of the {sizes.kv_heads} heads of k"
        )
    shape = (*q.shape[:2], sizes.heads, sizes.head_dim)
    if gate is not None and gate.shape != shape:
        raise ValueError(f"gate has shape {gate.shape}, expected {shape}")
    if table is None and k.shape[-4] != sizes.batch:
        raise ValueError(
            f"k has {k.shape[-4]} rows, expected {sizes.batch} as q has shape {q.shape}"
        )
    if sizes.length < 1 or k.shape[-4] < 1:
        raise ValueError(f"k has shape {k.shape}, expected room for a token")
    for name, array, rank in (("lengths", lengths, 1), ("table", table, 2)):
        if array is None:
            continue
        is_whole = jnp.issubdtype(array.dtype, jnp.integer)
        if not is_whole or array.ndim != rank or array.shape[0] != sizes.batch:
            shape = f"[{sizes.batch}{', N' * (rank - 1)}]"
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, expected int{shape}"
            )
    if table is not None and table.shape[1] < 1:
        raise ValueError(f"table has shape {table.shape}, expected at least one page")
    if layer is not None and (
        jnp.shape(layer) != ()
        or not jnp.issubdtype(jnp.result_type(layer), jnp.integer)
    ):
        raise ValueError(f"layer is {layer}, expected one integer")
    if sinks is not None and sinks.shape != (sizes.heads,):
        raise ValueError(f"sinks has shape {sinks.shape}, expected ({sizes.heads},)")

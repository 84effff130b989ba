"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.gated_delta_rule.checks import expect
from pallas_kernels.gated_delta_step import pools
from pallas_kernels.ssd.api import check_limit
from pallas_kernels.ssd_step import config as configs
from pallas_kernels.ssd_step import reference, xla
from pallas_kernels.ssd_step.layer import Layer


STATE_DTYPES = ("float32", "bfloat16")
MEASURED_HEADS = 512  # of all rows: what the rows measured faster have at least


def choose(
    xbc: Any,
    dt: Any,
    z: Any,
    layer: Layer,
    conv_pool: Any,
    state_pool: Any,
    *args: Any,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `ssd_step` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    del dt, z, args, options
    refused: dict[str, str] = {}
    group = state_pool.shape[1] // layer.groups
    kinds = {"dtype": xbc.dtype, "state_dtype": state_pool.dtype}
    reason = configs.refusal(
        batch=xbc.shape[0],
        entry=state_pool.shape[1:],
        groups=layer.groups,
        conv_width=layer.conv_weight.shape[0],
        conv_dtype=conv_pool.dtype,
        **kinds,
    )
    if not (hw.is_hopper() or interpret.is_interpreting()):
        reason = f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
    if reason is None:
        if config is None:
            config = configs.heuristic(group=group, **kinds)
        reason = config.refusal(group, **kinds)
    if reason is not None:
        refused["mosaic"] = reason
    only_named, heads = {}, xbc.shape[0] * state_pool.shape[1]
    if heads < MEASURED_HEADS:
        only_named["mosaic"] = f"XLA is as fast for {heads} heads of all rows"
    return select(
        "ssd_step", implementation, refused, only_named=only_named, config=config
    )


def ssd_step(
    xbc: jax.Array,
    dt: jax.Array,
    z: jax.Array,
    layer: Layer,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array | None = None,
    *,
    is_real: jax.Array | None = None,
    is_first: jax.Array | None = None,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token of a Mamba-2 layer (Dao and Gu 2024, arXiv 2405.21060).

    From the projections of a token to the output before the last projection: short
    convolution with SiLU, step sizes, the state's update and read, the skip, the norm
    behind the gate. Sums, steps, decays and the update are f32; what the layer rounds
    to xbc's dtype between them (the convolution's result, the read) is rounded here
    too. Donate the pools: "mosaic" then writes them in place.

    Args:
      xbc: [B, C], channels [x | b | c], C = H V + 2 G N.
      dt: f32[B, H], before bias and softplus.
      z: [B, H * V], the output gate, dtype of xbc.
      layer: the layer's small parameters.
      conv_pool: [slots, W - 1, C], the last inputs of the convolution, newest last.
      state_pool: [slots, H, V, N], float32 or bfloat16.
      slots: i32[B], where a row's document is kept; -1 skips the row, and so does any
        other slot outside the pool, which a NumPy array is refused for. No two rows may
        name one slot: checked in NumPy arrays, undefined otherwise. `None` puts row b
        at slot b.
      is_real: bool[B], `False` skips the row as slot -1 does.
      is_first: bool[B], whether the token begins a document: window and state count
        as zero.
      config: tiling of "mosaic", `None` for that of these sizes.
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has V = 64,
        N = 128, 2, 4, 8 or 16 heads per group, bfloat16 or float32; `None` does not
        take it yet. It has no gradient.

    Returns:
      (y [B, H * V] of xbc's dtype, the new conv pool, the new state pool). A skipped
      row's y is zero; slots that no row names keep their bits.

    Raises:
      ValueError: a shape, dtype, limit or slot is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    _check(xbc, dt, z, layer, conv_pool, state_pool, slots)
    for name, mask in (("is_real", is_real), ("is_first", is_first)):
        if mask is not None:
            expect(name, mask, xbc.shape[:1], jnp.bool_)
    slots = pools.inside(slots, state_pool.shape[0])
    choice = choose(
        *(xbc, dt, z, layer, conv_pool, state_pool),
        config=config,
        implementation=implementation,
    )
    live = pools.live_rows(slots, is_real)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.ssd_step import kernel

        places = jnp.arange(xbc.shape[0], dtype=jnp.int32) if slots is None else slots
        if live is not None:
            places = jnp.where(live, places, -1)
        return kernel.ssd_step(
            choice.config, xbc, dt, z, layer, conv_pool, state_pool, places, is_first
        )
    run = reference if choice.implementation == "reference" else xla
    window = pools.take(conv_pool, slots, is_first)
    state = pools.take(state_pool, slots)
    y, window, state = run.step(layer, xbc, dt, z, window, state, is_first)
    return (
        pools.masked(y, live),
        pools.put(conv_pool, slots, live, window),
        pools.put(state_pool, slots, live, state),
    )


def _check(
    xbc: Any, dt: Any, z: Any, layer: Layer, conv_pool: Any, state_pool: Any, slots: Any
) -> None:
    """Checks a call's shapes and dtypes."""
    for name, array, rank in (
        ("xbc", xbc, 2),
        ("conv_pool", conv_pool, 3),
        ("state_pool", state_pool, 4),
    ):
        if array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}, expected {rank} axes")
    if not jnp.issubdtype(xbc.dtype, jnp.floating):
        raise ValueError(f"xbc has dtype {xbc.dtype}, expected a floating one")
    if state_pool.dtype not in map(jnp.dtype, STATE_DTYPES):
        raise ValueError(
            f"state_pool has dtype {state_pool.dtype}, allowed are "
            f"{', '.join(STATE_DTYPES)}"
        )
    check_limit(layer.dt_limit)
    batch = xbc.shape[0]
    count, heads, dim, size = state_pool.shape
    if layer.groups < 1 or heads % layer.groups:
        raise ValueError(
            f"state_pool has {heads} heads, which is no multiple of the "
            f"{layer.groups} groups"
        )
    channels = heads * dim + 2 * layer.groups * size
    weight = layer.conv_weight
    width = weight.shape[0] if weight.ndim == 2 else 0
    if width < 2:
        raise ValueError(
            f"conv_weight has shape {weight.shape}, expected [W, C] with W >= 2"
        )
    expect("xbc", xbc, (batch, channels), xbc.dtype)
    expect("dt", dt, (batch, heads), jnp.float32)
    expect("z", z, (batch, heads * dim), xbc.dtype)
    expect("conv_weight", weight, (width, channels), weight.dtype)
    expect("conv_bias", layer.conv_bias, (channels,), layer.conv_bias.dtype)
    for name in ("A_log", "D", "dt_bias"):
        expect(name, getattr(layer, name), (heads,), jnp.float32)
    expect("norm_scale", layer.norm_scale, (heads * dim,), layer.norm_scale.dtype)
    expect("conv_pool", conv_pool, (count, width - 1, channels), conv_pool.dtype)
    if slots is not None:
        pools.check_slots(slots, batch, count)
    elif count != batch:
        raise ValueError(
            f"{count} slots for {batch} rows, without `slots` expected as many"
        )

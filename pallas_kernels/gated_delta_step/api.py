"""The public functions: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.gated_delta_step import config as configs
from pallas_kernels.gated_delta_step import pools, reference, xla
from pallas_kernels.gated_delta_step.layer import Layer, Pending


STATE_DTYPES = ("float32", "bfloat16")


def choose(
    qkv: Any,
    a: Any,
    b: Any,
    z: Any,
    layer: Layer,
    conv_pool: Any,
    state_pool: Any,
    *args: Any,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `gated_delta_step` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    del a, b, z, args, options
    refused, config = {}, None
    sizes = {
        "batch": qkv.shape[0],
        "key_heads": layer.key_heads,
        "value_heads": state_pool.shape[1],
        "key_dim": state_pool.shape[3],
        "value_dim": state_pool.shape[2],
        "conv_width": layer.conv_weight.shape[0],
        "dtype": qkv.dtype,
        "conv_dtype": conv_pool.dtype,
        "state_dtype": state_pool.dtype,
    }
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(**sizes):
        refused["mosaic"] = reason
    else:
        config = configs.pick(
            batch=qkv.shape[0],
            key_heads=layer.key_heads,
            value_heads=state_pool.shape[1],
            dtype=qkv.dtype,
            state_dtype=state_pool.dtype,
        )
        group = state_pool.shape[1] // layer.key_heads
        if reason := config.refusal(group, qkv.dtype, state_pool.dtype):
            refused["mosaic"] = reason
    return select(
        "gated_delta_step",
        implementation,
        refused,
        config=config,
    )


def gated_delta_step(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    layer: Layer,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array | None = None,
    *,
    is_real: jax.Array | None = None,
    is_first: jax.Array | None = None,
    implementation: Implementation | Choice | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token of a Gated DeltaNet layer (Yang et al. 2024, arXiv 2412.06464).

    From the projections of a token to the output before the last projection: short
    convolution with SiLU, unit length of q and k, gates, the state's update and
    read, the gated norm. Sums, gates, norms and the update are f32; what the layer
    rounds to qkv's dtype between them (the convolution's result, unit q and k, the
    read) is rounded here too. Donate the pools: "mosaic" then writes them in place.

    Args:
      qkv: [B, C], channels [q | k | v], C = 2 Hk K + Hv V.
      a: f32[B, Hv], the decay's input.
      b: f32[B, Hv], beta before the sigmoid.
      z: [B, Hv * V], the output gate, dtype of qkv.
      layer: the layer's small parameters.
      conv_pool: [slots, W - 1, C], the last inputs of the convolution, newest last.
      state_pool: [slots, Hv, V, K], float32 or bfloat16.
      slots: i32[B], where a row's document is kept; -1 skips the row, and so
        does any other slot outside the pool, which a NumPy array is refused for. No
        two rows may name one slot: checked in NumPy arrays, undefined otherwise.
        `None` puts row b at slot b.
      is_real: bool[B], `False` skips the row as slot -1 does.
      is_first: bool[B], whether the token begins a document: window and state count
        as zero.
      implementation: "mosaic", "xla", "reference" or `None`; or what `choose` said
        of such a call. "mosaic" has K = V = 128, bfloat16 or float32, and is never
        picked by itself so far.

    Returns:
      (y [B, Hv * V] of qkv's dtype, the new conv pool, the new state pool). A skipped
      row's y is zero; slots that no row names keep their bits.

    Raises:
      ValueError: a shape, dtype or slot is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    _check((qkv, a, b, z), layer, conv_pool, state_pool, slots, time=None)
    _check_masks(qkv.shape[0], is_real=is_real, is_first=is_first)
    slots = pools.inside(slots, state_pool.shape[0])
    if isinstance(implementation, Choice):
        choice = implementation
    else:
        choice = choose(
            qkv, a, b, z, layer, conv_pool, state_pool, implementation=implementation
        )
    live = pools.live_rows(slots, is_real)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.gated_delta_step import kernel

        places = _places(slots, live, qkv.shape[0])
        return kernel.gated_delta_step(
            choice.config,
            qkv,
            a,
            b,
            z,
            layer,
            conv_pool,
            state_pool,
            places,
            is_first,
        )
    run = reference if choice.implementation == "reference" else xla
    window = pools.take(conv_pool, slots, is_first)
    state = pools.take(state_pool, slots)
    y, window, state, *_ = run.step(layer, qkv, a, b, z, window, state, is_first)
    return (
        pools.masked(y, live),
        pools.put(conv_pool, slots, live, window),
        pools.put(state_pool, slots, live, state),
    )


def _choose_verify(
    op: str,
    implementation: Implementation | None,
    qkv: Any,
    key_heads: int,
    conv_pool: Any,
    state_pool: Any,
) -> Choice:
    """What `gated_delta_verify` or `gated_delta_commit` runs, by its sizes."""
    refused = {}
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.verify_refusal(
        time=qkv.shape[1],
        key_heads=key_heads,
        entry=state_pool.shape[1:],
        conv_width=conv_pool.shape[1] + 1,
        dtype=qkv.dtype,
        conv_dtype=conv_pool.dtype,
        state_dtype=state_pool.dtype,
    ):
        refused["mosaic"] = reason
    only_named = {"mosaic": "no measured row speaks for it yet"}
    return select(op, implementation, refused, only_named=only_named)


def _places(slots: jax.Array | None, live: jax.Array | None, batch: int) -> jax.Array:
    """Of each row its slot, i32[B], -1 where it has none or is not live."""
    places = jnp.arange(batch, dtype=jnp.int32) if slots is None else slots
    return places if live is None else jnp.where(live, places, -1)


def gated_delta_verify(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    layer: Layer,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array | None = None,
    *,
    is_first: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Pending]:
    """Outputs of T tokens, of which a prefix may be kept, without touching the pools.

    What `gated_delta_step` would give token after token, from one read of the state;
    meant for the 2 to 16 tokens of speculative decoding. Its f32 sums have another
    order, and a bfloat16 state is not rounded between the tokens.

    Args:
      qkv: [B, T, C].
      a, b: f32[B, T, Hv].
      z: [B, T, Hv * V].
      layer, conv_pool, state_pool, slots: as for `gated_delta_step`.
      is_first: bool[B], whether the first of the tokens begins a document.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      (y [B, T, Hv * V] of qkv's dtype, zero in rows of slot -1; what
      `gated_delta_commit` needs).

    Raises:
      ValueError: a shape, dtype or slot is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    time = qkv.shape[1] if qkv.ndim == 3 else 0
    _check((qkv, a, b, z), layer, conv_pool, state_pool, slots, time=time)
    _check_masks(qkv.shape[0], is_first=is_first)
    slots = pools.inside(slots, state_pool.shape[0])
    choice = _choose_verify(
        *("gated_delta_verify", implementation),
        *(qkv, layer.key_heads, conv_pool, state_pool),
    )
    live = pools.live_rows(slots, None)
    if choice.implementation == "mosaic":
        from pallas_kernels.gated_delta_step import kernel_verify

        places = _places(slots, live, qkv.shape[0])
        tokens = (qkv, a, b, z, layer, conv_pool, state_pool)
        y, pending = kernel_verify.gated_delta_verify(*tokens, places, is_first)
        return pools.masked(y, live), pending
    run = reference if choice.implementation == "reference" else xla
    window = pools.take(conv_pool, slots, is_first)
    state = pools.take(state_pool, slots)
    y, pending = run.verify(layer, qkv, a, b, z, window, state, is_first)
    return pools.masked(y, live), pending


def gated_delta_commit(
    pending: Pending,
    accepted: jax.Array,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Folds the accepted prefix of verified tokens into the pools.

    Args:
      pending: of `gated_delta_verify` with the same pools and slots.
      accepted: i32[B], tokens to keep, 0 to T; 0 leaves the row's slot bit for bit.
      conv_pool, state_pool, slots: as they were for `gated_delta_verify`.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      (the new conv pool, the new state pool): as if the accepted tokens alone had
      been read.

    Raises:
      ValueError: a shape, dtype or slot is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    batch, time, channels = pending.qkv.shape
    _expect("accepted", accepted, (batch,), jnp.int32)
    heads, value_dim = pending.written.shape[2:]
    entry = (heads, value_dim, pending.k.shape[3])
    _check_pools(batch, channels, entry, conv_pool, state_pool, slots)
    slots = pools.inside(slots, state_pool.shape[0])
    choice = _choose_verify(
        *("gated_delta_commit", implementation, pending.qkv),
        *(pending.k.shape[2], conv_pool, state_pool),
    )
    accepted = jnp.clip(accepted, 0, time)
    some = accepted > 0
    live = some if slots is None else some & (slots >= 0)
    if choice.implementation == "mosaic":
        from pallas_kernels.gated_delta_step import kernel_verify

        places = _places(slots, live, batch)
        return kernel_verify.gated_delta_commit(
            *(pending, accepted, conv_pool, state_pool, places)
        )
    run = reference if choice.implementation == "reference" else xla
    window = pools.take(conv_pool, slots, pending.is_first)
    state = pools.take(state_pool, slots, pending.is_first)
    window, state = run.commit(pending, accepted, window, state)
    return (
        pools.put(conv_pool, slots, live, window),
        pools.put(state_pool, slots, live, state),
    )


def _expect(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name} has dtype {array.dtype}, expected {jnp.dtype(dtype)}")


def _check(
    tokens: tuple[Any, ...],
    layer: Layer,
    conv_pool: Any,
    state_pool: Any,
    slots: Any,
    *,
    time: int | None,
) -> None:
    """Checks a call's shapes and dtypes; `time` is `None` without a T axis."""
    qkv, a, b, z = tokens
    if qkv.ndim != (2 if time is None else 3) or time == 0:
        axes = "[B, C]" if time is None else "[B, T, C] with T >= 1"
        raise ValueError(f"qkv has shape {qkv.shape}, expected {axes}")
    if not jnp.issubdtype(qkv.dtype, jnp.floating):
        raise ValueError(f"qkv has dtype {qkv.dtype}, expected a floating one")
    if state_pool.ndim != 4:
        raise ValueError(
            f"state_pool has shape {state_pool.shape}, expected [slots, Hv, V, K]"
        )
    heads, value_dim, key_dim = state_pool.shape[1:]
    if layer.key_heads < 1 or heads % layer.key_heads:
        raise ValueError(
            f"state_pool has {heads} heads, which is no multiple of the "
            f"{layer.key_heads} key heads"
        )
    channels = 2 * layer.key_heads * key_dim + heads * value_dim
    lead = qkv.shape[:-1]
    _expect("qkv", qkv, (*lead, channels), qkv.dtype)
    _expect("a", a, (*lead, heads), jnp.float32)
    _expect("b", b, (*lead, heads), jnp.float32)
    _expect("z", z, (*lead, heads * value_dim), qkv.dtype)
    _expect("A_log", layer.A_log, (heads,), jnp.float32)
    _expect("dt_bias", layer.dt_bias, (heads,), jnp.float32)
    _expect("norm_scale", layer.norm_scale, (value_dim,), layer.norm_scale.dtype)
    weight = layer.conv_weight
    width = weight.shape[0] if weight.ndim == 2 else 0
    if width < 2:
        raise ValueError(
            f"conv_weight has shape {weight.shape}, expected [W, C] with W >= 2"
        )
    _expect("conv_weight", weight, (width, channels), weight.dtype)
    entry = (heads, value_dim, key_dim)
    _check_pools(lead[0], channels, entry, conv_pool, state_pool, slots)
    if conv_pool.shape[1] != width - 1:
        raise ValueError(
            f"conv_pool keeps {conv_pool.shape[1]} inputs, expected W - 1 = {width - 1}"
        )


def _check_pools(
    batch: int,
    channels: int,
    entry: tuple[int, int, int],
    conv_pool: Any,
    state_pool: Any,
    slots: Any,
) -> None:
    if state_pool.dtype not in map(jnp.dtype, STATE_DTYPES):
        raise ValueError(
            f"state_pool has dtype {state_pool.dtype}, allowed are "
            f"{', '.join(STATE_DTYPES)}"
        )
    count = state_pool.shape[0]
    _expect("state_pool", state_pool, (count, *entry), state_pool.dtype)
    if conv_pool.ndim != 3:
        raise ValueError(
            f"conv_pool has shape {conv_pool.shape}, expected [slots, W - 1, C]"
        )
    shape = (count, conv_pool.shape[1], channels)
    _expect("conv_pool", conv_pool, shape, conv_pool.dtype)
    if slots is not None:
        pools.check_slots(slots, batch, count)
    elif count != batch:
        raise ValueError(
            f"{count} slots for {batch} rows, without `slots` expected as many"
        )


def _check_masks(batch: int, **masks: Any) -> None:
    for name, mask in masks.items():
        if mask is not None:
            _expect(name, mask, (batch,), jnp.bool_)

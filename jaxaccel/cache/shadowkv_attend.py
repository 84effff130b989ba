"""What ShadowKV chose, attended to by the op that makes its keys on the way."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxaccel.cache.layer_state import AttentionSpec, LayerState, Tokens
from jaxaccel.cache.policy import CachePolicy, Selection
from pallas_kernels._common.dispatch import Implementation
from pallas_kernels.sparse_decode_attention import (
    Held,
    Rotary,
    choose,
    sparse_decode_attention,
)


def rotary_of(spec: AttentionSpec) -> Rotary | None:
    """The layer's rotary embedding as the op takes it.

    Raises:
      NotImplementedError: it has none that can be said so.
    """
    if spec.rotate is None:
        return None
    make = getattr(spec.rotate, "rotary", None)
    found = None if make is None else make(spec.head_dim)
    if found is None:
        raise NotImplementedError(
            "ShadowKVCacheConfig: attention is named, which needs all dimensions of a "
            f"key to turn, those of {spec.rotate} do not"
        )
    return found


def _held(state: LayerState, spec: AttentionSpec, in_ring: jax.Array) -> Held:
    """The state's arrays, those of all layers where they are large."""
    batch, heads = state["ring_k"].shape[:2]
    has_slots = state.size("v_slot")[2] > 0

    def whole(name: str) -> jax.Array:
        return state.place(name)[0]

    return Held(
        a=whole("a"),
        basis=state["basis"].reshape(batch, heads, spec.head_dim, -1),
        first=state["first"],
        values=whole("v_slot" if has_slots else "values"),
        out_k=whole("out_k"),
        out_v=whole("out_v"),
        out_count=state["seen_outliers"],
        ring_k=state["ring_k"],
        ring_v=state["ring_v"],
        ring_valid=in_ring,
    )


def check(
    policy: CachePolicy,
    spec: AttentionSpec,
    max_length: int,
    implementation: Implementation,
) -> None:
    """Refuses a layer that the named implementation cannot attend to.

    Raises:
      NotImplementedError: as `sparse_decode_attention` and `rotary_of`.
    """

    def arrays():
        state = policy.init(spec, 1, max_length, jnp.bfloat16)
        in_ring = jnp.zeros((1, state["ring_k"].shape[2]), jnp.bool_)
        ids = state["ids"]
        q = jnp.zeros((1, spec.num_heads, spec.head_dim), jnp.bfloat16)
        return q, _held(state, spec, in_ring), ids, ids, ids[..., 0]

    shapes = jax.eval_shape(arrays)
    choose(*shapes, rotary=rotary_of(spec), implementation=implementation)


def attend(
    state: LayerState,
    tokens: Tokens,
    selection: Selection,
    spec: AttentionSpec,
    in_ring: jax.Array,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """As `CachePolicy.attend`.

    Args:
      state, tokens, selection, spec: as there; valid chunks stand in front.
      in_ring: bool[B, R], slots of the ring that are read.
      implementation: of `pallas_kernels.sparse_decode_attention`.
    """
    o, lse = sparse_decode_attention(
        tokens.q[:, 0],
        _held(state, spec, in_ring),
        selection.ids,
        selection.ids if selection.slots is None else selection.slots,
        jnp.sum(selection.valid, axis=-1, dtype=jnp.int32),
        rotary=rotary_of(spec),
        scale=spec.scale,
        logit_cap=spec.logit_cap,
        sinks=tokens.sinks,
        layer=state.index,
        implementation=implementation,
    )
    return o[:, None], lse[:, None]

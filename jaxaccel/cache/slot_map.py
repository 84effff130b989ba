"""Which chunk is in which slot on the device, and which must be fetched."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """What a request finds, and the map after it.

    Attributes:
      slots: i32[B, G, N], where each requested chunk is, or is to be put.
      is_miss: bool[B, G, N], the chunks to fetch.
      slot_chunk: i32[B, G, M], the chunk in each slot, -1 for none.
      slot_age: i32[B, G, M], the step at which a slot was last asked for, -1 for never.
    """

    slots: jax.Array
    is_miss: jax.Array
    slot_chunk: jax.Array
    slot_age: jax.Array


def assign(
    slot_chunk: jax.Array,
    slot_age: jax.Array,
    chunks: jax.Array,
    valid: jax.Array,
    step: jax.Array,
) -> SlotPlan:
    """Finds slots for requested chunks; those that are held stay where they are.

    A missing chunk takes the slot that was not asked for for longest: the first of
    equal ones, and never one that this request uses. Hence only the set difference is
    fetched, and no value moves on the device.

    Args:
      slot_chunk: i32[B, G, M], M >= N.
      slot_age: i32[B, G, M].
      chunks: i32[B, G, N], different from each other where valid.
      valid: bool[B, G, N]; the slots of other places mean nothing.
      step: i32[], larger than in earlier calls.

    Returns:
      The plan.

    Raises:
      ValueError: there are fewer slots than requested chunks.
    """
    batch, heads, count = chunks.shape
    num_slots = slot_chunk.shape[-1]
    if num_slots < count:
        raise ValueError(f"{count} chunks are requested of {num_slots} slots")
    same = (chunks[..., :, None] == slot_chunk[..., None, :]) & valid[..., None]
    is_hit = jnp.any(same, axis=-1)  # [B, G, N]
    is_used = jnp.any(same, axis=-2)  # [B, G, M]
    newest = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(is_used, newest, slot_age), axis=-1, stable=True)
    is_miss = valid & ~is_hit
    rank = jnp.cumsum(is_miss.astype(jnp.int32), axis=-1) - 1
    victim = jnp.take_along_axis(order, jnp.maximum(rank, 0), axis=-1)
    slots = jnp.where(is_hit, jnp.argmax(same, axis=-1), victim).astype(jnp.int32)

    row = jnp.arange(batch)[:, None, None]
    head = jnp.arange(heads)[None, :, None]
    taken = jnp.where(is_miss, slots, num_slots)
    asked = jnp.where(valid, slots, num_slots)
    step = jnp.broadcast_to(step.astype(jnp.int32), slots.shape)
    return SlotPlan(
        slots=slots,
        is_miss=is_miss,
        slot_chunk=slot_chunk.at[row, head, taken].set(chunks, mode="drop"),
        slot_age=slot_age.at[row, head, asked].set(step, mode="drop"),
    )

"""Routed experts that lie on several devices.

Device i of a mesh axis has the i-th part of the experts and its part of the tokens.
Two ways bring them together, for n devices, t tokens a device, k experts a token, width
D (the latent's where there is one):

- "allgather": every device gathers all tokens, sends them through its own experts, and
  the sums are reduced and scattered. (n - 1) t D numbers each way, whatever k is.
- "ragged_all_to_all": each row goes to its expert's device and back, k (n - 1) / n t D
  numbers each way: less where n > k. XLA has it on GPUs; "all_to_all" is the same
  exchange through blocks of a fixed size, which runs everywhere and moves up to n times
  as much.

Sums over the tokens of all devices stand in their owner's order, so either way gives
one device's result up to rounding.

A device with less room than rows, see `MoEConfig.expert_capacity`, drops the last ones,
and which are last depends on the exchange. Rows are sorted by expert, then by token:

- "allgather" sorts those of all senders together. The device's experts of the highest
  numbers lose rows first, each its latest tokens, whoever sent them.
- Where rows are sent, those of each sender are sorted, one sender's behind another's.
  The last devices of the axis lose all rows first; of the sender at which room ends,
  the receiver's experts of the highest numbers do.

So full devices starve the same experts, or the same senders, step after step, and the
exchanges agree on how many rows are dropped, not on which. A capacity that is seldom
reached is what it is for; balance comes from the router's bias or losses.

Parameters do not rest where they are used: `core.sharding` cuts experts by width over
"fsdp" and "tensor", as it does every matrix, and the exchange asks for whole experts.
XLA moves them on every pass, and their gradients back: at most a device's part of the
experts each time, which a log line tells.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxaccel.core.sharding import check_divisible
from jaxaccel.nn.experts import ExpertOps, ExpertWeights, routed_experts
from jaxaccel.nn.router import EXCHANGES
from pallas_kernels.sort_dispatch import (
    DispatchPlan,
    limit_rows,
    permute,
    row_weights,
    sort_dispatch,
)


_log = logging.getLogger("jaxaccel")

# Backends whose XLA can run `ragged_all_to_all`.
_RAGGED_BACKENDS = ("gpu", "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSharding:
    """Where experts and tokens lie.

    Attributes:
      mesh: the devices; `jax.sharding.get_abstract_mesh()` will do.
      axis: mesh axis over which experts lie.
      batch_axes: mesh axes over which rows [B, ...] lie, `axis` among them. Over all
        others everything is computed alike.
      exchange: one of `EXCHANGES`; "auto" takes what moves fewer bytes.
      capacity: see `MoEConfig.expert_capacity`.
    """

    mesh: Any
    axis: str
    batch_axes: tuple[str, ...]
    exchange: str = "auto"
    capacity: float = 0.0

    def __post_init__(self):
        if self.axis not in self.batch_axes:
            raise ValueError(
                f"axis={self.axis!r} of the experts must be one of those that rows lie "
                f"on, which are {self.batch_axes}"
            )
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"exchange={self.exchange!r} is unknown, allowed are "
                f"{', '.join(map(repr, EXCHANGES))}"
            )

    @property
    def devices(self) -> int:
        """Parts of the experts."""
        return self.mesh.shape[self.axis]

    @property
    def row_parts(self) -> int:
        """Parts of the rows."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    def capacity_rows(self, tokens: int, slots: int, experts: int) -> int:
        """Sorted rows that a device has room for.

        Args:
          tokens: of one device.
          slots: k.
          experts: of one device.
        """
        # A token visits an expert once: this is the most that can come.
        most = self.devices * tokens * min(slots, experts)
        if not self.capacity:
            return most
        return max(1, min(most, math.ceil(tokens * slots * self.capacity)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a device sends in a forward pass, by exchange; a backward as many.

    Attributes:
      allgather: tokens, ids and weights out, sums in.
      ragged_all_to_all: rows and weights out, rows back.
    """

    allgather: int
    ragged_all_to_all: int


def traffic(
    *, devices: int, tokens: int, slots: int, width: int, itemsize: int
) -> Traffic:
    """What the two exchanges move.

    Args:
      devices: n.
      tokens: t of one device.
      slots: k.
      width: D.
      itemsize: bytes of a number of a token.
    """
    token = width * itemsize
    row = 2 * token + 4
    return Traffic(
        allgather=(devices - 1) * tokens * (2 * token + 8 * slots),
        ragged_all_to_all=(devices - 1) * tokens * slots * row // devices,
    )


def choose_exchange(
    sharding: ExpertSharding, *, tokens: int, slots: int, width: int, itemsize: int
) -> str:
    """Picks an exchange and says so once.

    Args:
      sharding: its `exchange` is obeyed unless it is "auto".
      tokens, slots, width, itemsize: as for `traffic`.

    Returns:
      "allgather", "all_to_all" or "ragged_all_to_all".

    Raises:
      NotImplementedError: "ragged_all_to_all" on a backend that cannot run it.
    """
    moved = traffic(
        devices=sharding.devices,
        tokens=tokens,
        slots=slots,
        width=width,
        itemsize=itemsize,
    )
    backend = jax.default_backend()
    picked, why = sharding.exchange, "named"
    if picked == "ragged_all_to_all" and backend not in _RAGGED_BACKENDS:
        raise NotImplementedError(
            f"expert_exchange='ragged_all_to_all' cannot run on {backend!r}: XLA has "
            f"it on {', '.join(_RAGGED_BACKENDS)} only; 'all_to_all' runs everywhere"
        )
    if picked == "auto":
        if moved.allgather <= moved.ragged_all_to_all:
            picked, why = "allgather", "fewer bytes"
        elif backend in _RAGGED_BACKENDS:
            picked, why = "ragged_all_to_all", "fewer bytes"
        else:
            picked, why = "allgather", f"the other does not run on {backend}"
    _announce(sharding.devices, tokens, moved, picked, why)
    return picked


@functools.cache
def _announce_parameters(devices: int, size: int) -> None:
    _log.info(
        "experts on %d devices: %.3f MB of parameters on each, of which up to all are "
        "fetched in a forward pass",
        devices,
        size / 1e6,
    )


@functools.cache
def say_indivisible(rows: int, parts: int) -> None:
    """Says once that so many rows are computed without an exchange."""
    _log.info(
        "experts on several devices: %d rows do not divide over %d devices and are "
        "computed without an exchange, which drops none",
        rows,
        parts,
    )


@functools.cache
def _announce(devices: int, tokens: int, moved: Traffic, picked: str, why: str) -> None:
    _log.info(
        "experts on %d devices, %d tokens each: a device sends %.2f MB a forward pass "
        "by allgather, %.2f MB by ragged_all_to_all; takes %s (%s)",
        devices,
        tokens,
        moved.allgather / 1e6,
        moved.ragged_all_to_all / 1e6,
        picked,
        why,
    )


def sharded_experts(
    sharding: ExpertSharding,
    ops: ExpertOps,
    h: jax.Array,
    weights: jax.Array,
    expert_ids: jax.Array,
    experts: ExpertWeights,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`routed_experts` with the experts on the devices of a mesh axis.

    Args:
      sharding: where experts and tokens lie.
      ops: what to compute.
      h: [B, T, D] of `ops.dtype`, global.
      weights: f32[B, T, k].
      expert_ids: i32[B, T, k]; E sends a slot nowhere.
      experts: parameters, leading axis E.

    Returns:
      ([B, T, D]; i32[E], tokens that were routed to each expert; i32[], rows that found
      no room and add nothing).

    Raises:
      ValueError: E or B has no equal parts.
      NotImplementedError: as `choose_exchange` raises.
    """
    num_experts = experts.w_in.shape[0]
    check_divisible(
        "num_experts",
        num_experts,
        sharding.axis,
        sharding.devices,
        advice="choose another mesh or expert_axis",
    )
    check_divisible(
        "batch rows",
        h.shape[0],
        "x".join(sharding.batch_axes),
        sharding.row_parts,
        advice="choose another mesh or another number of rows",
    )
    parameters = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(experts))
    _announce_parameters(sharding.devices, parameters // sharding.devices)
    batch, time, width = h.shape
    exchange = choose_exchange(
        sharding,
        tokens=batch * time // sharding.row_parts,
        slots=weights.shape[-1],
        width=width,
        itemsize=h.dtype.itemsize,
    )

    def part(h, weights, expert_ids, experts):
        tokens = h.reshape(-1, width)  # [t, D]
        slots = weights.shape[-1]
        arguments = tokens, weights.reshape(-1, slots), expert_ids.reshape(-1, slots)
        if exchange == "allgather":
            c, counts, lost = _by_gathering(sharding, ops, *arguments, experts)
        else:
            c, counts, lost = _by_sending(sharding, ops, exchange, *arguments, experts)
        counts, lost = (lax.psum(x, sharding.batch_axes) for x in (counts, lost))
        return c.reshape(h.shape), counts, lost

    tokens, own = PartitionSpec(sharding.batch_axes), PartitionSpec(sharding.axis)
    # What is equal on all devices is so by construction: a sum over all of them.
    return jax.shard_map(
        part,
        mesh=sharding.mesh,
        in_specs=(tokens, tokens, tokens, own),
        out_specs=(tokens, PartitionSpec(), PartitionSpec()),
        check_vma=False,
    )(h, weights, expert_ids, experts)


def _placed(sharding: ExpertSharding, own: jax.Array) -> jax.Array:
    """i32[E] that holds the counts of this device's experts in their place."""
    total = own.shape[0] * sharding.devices
    first = lax.axis_index(sharding.axis) * own.shape[0]
    whole = jnp.zeros((total,), jnp.int32)
    return lax.dynamic_update_slice_in_dim(whole, own, first, 0)


def _by_gathering(sharding: ExpertSharding, ops, h, weights, expert_ids, experts):
    own_experts = experts.w_in.shape[0]
    room = sharding.capacity_rows(h.shape[0], weights.shape[1], own_experts)
    h, weights, expert_ids = (
        lax.all_gather(x, sharding.axis, tiled=True) for x in (h, weights, expert_ids)
    )  # [n t, ...]
    local = expert_ids - lax.axis_index(sharding.axis) * own_experts
    is_own = (local >= 0) & (local < own_experts)
    plan = sort_dispatch(
        jnp.where(is_own, local, own_experts), own_experts, implementation=ops.dispatch
    )
    cut = limit_rows(plan, room)
    c = routed_experts(ops, h, weights, cut, experts)
    c = lax.psum_scatter(c, sharding.axis, scatter_dimension=0, tiled=True)
    lost = jnp.sum(plan.group_sizes) - jnp.sum(cut.group_sizes)
    return c, _placed(sharding, plan.group_sizes), lost


class Route(NamedTuple):
    """An exchange of slices of rows; i32[n] each, by the other device.

    `start` and `size` of the slice that goes to it, `place` where it begins there,
    `received` the size of the slice that comes from it.
    """

    start: jax.Array
    size: jax.Array
    place: jax.Array
    received: jax.Array


def routes(counts: jax.Array, room: int, me: jax.Array) -> tuple[Route, Route]:
    """The way of rows to their experts' devices, and back.

    Args:
      counts: i32[n, n], rows that each device (first axis) has for each.
      room: rows that fit into a device; later senders' rows do not fit first.
      me: index of this device.

    Returns:
      (there, back). Rows that do not fit are not sent, and nothing comes back.
    """
    start = jnp.cumsum(counts, axis=1) - counts
    place = jnp.cumsum(counts, axis=0) - counts
    sent = jnp.clip(room - place, 0, counts)
    place = jnp.minimum(place, room)
    # The place is the sender's to tell, so each device reads rows of both tables.
    there = Route(start[me], sent[me], place[me], sent[:, me])
    back = Route(place[:, me], sent[:, me], start[:, me], sent[me])
    return there, back


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange_rows(
    kind: str, axis: str, rows: int, x: jax.Array, there: Route, back: Route
) -> jax.Array:
    """Sends slices of rows between the devices of an axis, inside of `shard_map`.

    Args:
      kind: "ragged_all_to_all" or "all_to_all".
      axis: the mesh axis.
      rows: of the result.
      x: [M, D].
      there: what goes where.
      back: the same exchange in reverse, which gradients take.

    Returns:
      [rows, D]; rows that nobody sends are exactly 0.
    """
    del back
    if kind == "all_to_all":
        return _in_blocks(axis, rows, x, there)
    # Zeros and no gradient: the transpose of this operand is wrong for empty slices.
    empty = lax.stop_gradient(jnp.zeros((rows, x.shape[1]), x.dtype))
    return lax.ragged_all_to_all(
        x,
        empty,
        there.start,
        there.size,
        there.place,
        there.received,
        axis_name=axis,
    )


def _exchange_forward(kind, axis, rows, x, there, back):
    # An array of no columns remembers the number of rows.
    saved = there, back, x[:, :0]
    return exchange_rows(kind, axis, rows, x, there, back), saved


def _exchange_backward(kind, axis, rows, saved, dy):
    del rows
    there, back, x = saved
    return exchange_rows(kind, axis, x.shape[0], dy, back, there), None, None


exchange_rows.defvjp(_exchange_forward, _exchange_backward)


def _in_blocks(axis: str, rows: int, x: jax.Array, route: Route) -> jax.Array:
    """The ragged exchange by blocks, each of the size of the largest slice there is."""
    size = min(x.shape[0], rows)
    index = jnp.arange(size, dtype=jnp.int32)[None, :]  # [1, size]
    source = jnp.minimum(route.start[:, None] + index, x.shape[0] - 1)
    is_sent = index < route.size[:, None]  # [n, size]
    blocks = jnp.where(is_sent[:, :, None], x[source], jnp.zeros((), x.dtype))
    blocks = lax.all_to_all(blocks, axis, 0, 0, tiled=True)  # [n, size, D]
    place = lax.all_to_all(route.place, axis, 0, 0, tiled=True)[:, None]  # [n, 1]
    row = jnp.arange(rows, dtype=jnp.int32)[None, :]
    holds = (row >= place) & (row < place + route.received[:, None])  # [n, rows]
    sender = jnp.argmax(holds, axis=0)  # [rows]
    inside = jnp.clip(row[0] - place[sender, 0], 0, size - 1)
    y = blocks[sender, inside]
    return jnp.where(jnp.any(holds, axis=0)[:, None], y, jnp.zeros((), x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collect(dispatch: Any, rows: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Sums each token's rows, [M, D] -> [T, D]: the transpose of `permute`."""
    tokens = jnp.zeros((plan.row.shape[0], rows.shape[1]), rows.dtype)
    _, pull = jax.vjp(lambda x: permute(x, plan, implementation=dispatch), tokens)
    return pull(rows)[0]


def _collect_forward(dispatch, rows, plan):
    return _collect(dispatch, rows, plan), plan


def _collect_backward(dispatch, plan, dc):
    return permute(dc, plan, implementation=dispatch), None


_collect.defvjp(_collect_forward, _collect_backward)


def _by_sending(sharding: ExpertSharding, ops, kind, h, weights, expert_ids, experts):
    own_experts, devices = experts.w_in.shape[0], sharding.devices
    room = sharding.capacity_rows(h.shape[0], weights.shape[1], own_experts)
    me = lax.axis_index(sharding.axis)
    plan = sort_dispatch(expert_ids, own_experts * devices, implementation=ops.dispatch)
    sizes = lax.all_gather(plan.group_sizes, sharding.axis)  # [n, E]
    sizes = sizes.reshape(devices, devices, own_experts)
    there, back = routes(jnp.sum(sizes, axis=2), room, me)
    send = functools.partial(exchange_rows, kind, sharding.axis)
    # The weights go along, so that no row must be kept for their gradient.
    rows = send(room, ops.permute(h, plan), there, back)  # [room, D]
    scale = send(room, row_weights(plan, weights)[:, None], there, back)  # [room, 1]

    # What comes from one device is sorted by expert; the whole is not.
    mine = sizes[:, me].reshape(-1)  # [n * own experts]
    row = jnp.arange(room, dtype=jnp.int32)
    segment = jnp.searchsorted(
        jnp.cumsum(mine), row, side="right", method="scan_unrolled"
    )
    expert = jnp.where(segment < mine.size, segment % own_experts, own_experts)
    own = sort_dispatch(
        expert.astype(jnp.int32)[:, None], own_experts, implementation=ops.dispatch
    )
    y = routed_experts(ops, rows, scale, own, experts)
    y = send(plan.token.shape[0], y, back, there)  # [t k, D]
    lost = jnp.sum(mine) - jnp.sum(own.group_sizes)
    counts = _placed(sharding, jnp.sum(sizes[:, me], axis=0))
    return _collect(ops.dispatch, y, plan), counts, lost

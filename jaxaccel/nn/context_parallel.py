"""The recurrent mixers' operations with time sharded over the devices of a mesh axis.

Device i of the axis has the i-th part of every row. A document may begin anywhere and
go on over any number of devices; `is_first` is the global one, sharded like the tokens.

The rule is affine in the state (`pallas_kernels.gated_delta_rule.segments`), so each
device summarises its part as a map of states, S -> S @ through + written, the maps are
gathered, and each device chains those before its own to the state that enters its
part. What crosses devices is a [V + K, K] matrix per value head, whatever the length.
The gradient of the state does the same in reverse with the same maps. The short
convolution needs the W - 1 inputs before its part, which its neighbour has.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.causal_conv1d import causal_conv1d as _causal_conv1d
from pallas_kernels.gated_delta_rule import (
    chain,
    chain_gradients,
    entry_gradients,
    summaries,
)
from pallas_kernels.gated_delta_rule import gated_delta_rule as _gated_delta_rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSharding:
    """Where the parts of a batch lie.

    Attributes:
      mesh: the devices.
      axis: mesh axis over which time is sharded, in order.
      batch_axes: mesh axes over which rows are sharded.
      head_axes: mesh axes over which heads are sharded, those of keys and of values
        alike; over these the convolution's channels are sharded.
    """

    mesh: Mesh
    axis: str
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()

    def __post_init__(self):
        names = (self.axis, *self.batch_axes, *self.head_axes)
        for name in names:
            if name not in self.mesh.axis_names:
                raise ValueError(
                    f"{name!r} is no axis of the mesh, which has "
                    f"{', '.join(map(repr, self.mesh.axis_names))}"
                )
        if len(set(names)) < len(names):
            raise ValueError(f"{names} name a mesh axis twice")

    @property
    def devices(self) -> int:
        """Parts of a row."""
        return self.mesh.shape[self.axis]

    @property
    def tokens(self) -> PartitionSpec:
        """Of [B, T]."""
        return PartitionSpec(self.batch_axes, self.axis)

    @property
    def heads(self) -> PartitionSpec:
        """Of [B, T, H, ...] and [B, T, C]."""
        return PartitionSpec(self.batch_axes, self.axis, self.head_axes)

    @property
    def state(self) -> PartitionSpec:
        """Of [B, Hv, V, K], which every device of the axis has."""
        return PartitionSpec(self.batch_axes, self.head_axes)

    @property
    def parts(self) -> PartitionSpec:
        """Of [n, B, Hv, ...], one per part of the rows."""
        return PartitionSpec(self.axis, self.batch_axes, self.head_axes)

    def check(self, time: int) -> None:
        """Refuses rows that have no equal parts.

        Raises:
          ValueError: naming the length.
        """
        if time % self.devices:
            raise ValueError(
                f"T = {time} has no {self.devices} equal parts for the devices of "
                f"{self.axis!r}"
            )

    def map(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        """`fn` on every device, each with its part of the arrays."""
        # What is equal on all devices is so by construction, from what was gathered.
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


def _gathered(sharding: TimeSharding, x: jax.Array) -> jax.Array:
    """What each device of the axis has, [n, ...]."""
    return lax.all_gather(x, sharding.axis)


def _at(sharding: TimeSharding, x: jax.Array, offset: int = 0) -> jax.Array:
    """Of [n, ...] that of this device."""
    index = lax.axis_index(sharding.axis) + offset
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    scale: float
    chunk_size: int
    implementation: Any

    def rule(self, *args: jax.Array, is_first: jax.Array) -> Any:
        *tokens, state = args
        return _gated_delta_rule(
            *tokens,
            is_first=is_first,
            initial_state=state,
            scale=self.scale,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )

    @property
    def passes(self) -> dict[str, Any]:
        """Options of the passes over the state alone, which have no "reference"."""
        exact = self.implementation == "reference"
        return {
            "chunk_size": self.chunk_size,
            "implementation": "xla" if exact else self.implementation,
        }


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(sharding: TimeSharding, options: _Options, q, k, v, g, beta, first, state):
    return _rule_forward(sharding, options, q, k, v, g, beta, first, state)[0]


def _rule_forward(
    sharding: TimeSharding, options: _Options, q, k, v, g, beta, first, state
):
    def part(q, k, v, g, beta, first, state):
        summary = summaries(k, v, g, beta, is_first=first, **options.passes)
        every = jax.tree.map(functools.partial(_gathered, sharding), summary)
        states = chain(state, every)
        entry = _at(sharding, states)
        o, _ = options.rule(q, k, v, g, beta, entry, is_first=first)
        return o, states[-1], entry[None], summary.through[None]

    one = sharding
    o, last, entries, through = sharding.map(
        part,
        (*(one.heads,) * 5, one.tokens, one.state),
        (one.heads, one.state, one.parts, one.parts),
    )(q, k, v, g, beta, first, state)
    return (o, last), (q, k, v, g, beta, first, entries, through)


def _rule_backward(sharding: TimeSharding, options: _Options, saved, cotangents):
    def part(q, k, v, g, beta, first, entry, through, do, d_last):
        d_entry = entry_gradients(
            q, k, g, beta, do, is_first=first, scale=options.scale, **options.passes
        )
        through, d_entries = (_gathered(sharding, x) for x in (through[0], d_entry))
        d_states = chain_gradients(d_last, through, d_entries)
        rule = functools.partial(options.rule, is_first=first)
        _, pullback = jax.vjp(rule, q, k, v, g, beta, entry[0])
        *grads, _ = pullback((do, _at(sharding, d_states, 1)))
        return *grads, d_states[0]

    one = sharding
    *grads, d_state = sharding.map(
        part,
        (*(one.heads,) * 5, one.tokens, one.parts, one.parts, one.heads, one.state),
        (*(one.heads,) * 5, one.state),
    )(*saved, *cotangents)
    return *grads, None, d_state


_rule.defvjp(_rule_forward, _rule_backward)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    sharding: TimeSharding,
    is_first: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    implementation: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.gated_delta_rule` with time sharded over devices.

    Each device reads its tokens twice, once for the summary and once for the result.
    The backward computes the forward again from the state that enters the part.

    Args:
      q, k, v, g, beta: global arrays as for that one.
      sharding: where their parts lie; T is a multiple of the devices of its axis.
      is_first: bool[B, T], global.
      initial_state, scale, chunk_size: as for that one.
      implementation: as for that one. The passes over the state alone run "mosaic" if
        it is named and "xla" otherwise.

    Returns:
      (o, sharded like v; final_state, on every device of the axis). Equal to one
      device's up to rounding: a state that crosses devices is rounded otherwise.

    Raises:
      ValueError: T has no equal parts, or as for that one.
      NotImplementedError: the named implementation cannot run this call.
    """
    batch, time, _, key_dim = q.shape
    sharding.check(time)
    if is_first is None:
        is_first = jnp.zeros((batch, time), bool)
    if initial_state is None:
        shape = (batch, v.shape[2], v.shape[3], key_dim)
        initial_state = jnp.zeros(shape, jnp.float32)
    options = _Options(
        scale=key_dim**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    return _rule(sharding, options, q, k, v, g, beta, is_first, initial_state)


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    *,
    sharding: TimeSharding,
    bias: jax.Array | None = None,
    is_first: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    activation: Literal["silu"] | None = None,
    implementation: Any = None,
) -> jax.Array:
    """`pallas_kernels.causal_conv1d` with time sharded over devices.

    Args:
      x, weight, bias: global arrays as for that one; channels are sharded over the
        head axes.
      sharding: where their parts lie; the part of a device has at least W - 1 tokens.
      is_first: bool[B, T], global.
      initial_state: [B, W - 1, D], the inputs before the row.
      activation, implementation: as for that one.

    Returns:
      y [B, T, D], sharded like x. There is no final state: who needs one to go on
      decoding takes it from the last inputs of the row.

    Raises:
      ValueError: T has no equal parts or they are too short, or as for that one.
    """
    batch, time, dim = x.shape
    width = weight.shape[0]
    kept = width - 1
    sharding.check(time)
    if time // sharding.devices < kept:
        raise ValueError(
            f"T = {time} on {sharding.devices} devices leaves "
            f"{time // sharding.devices} tokens each, the convolution reads {kept} of "
            "the neighbour's"
        )
    if is_first is None:
        is_first = jnp.zeros((batch, time), bool)
    if initial_state is None:
        initial_state = jnp.zeros((batch, kept, dim), x.dtype)

    def part(x, weight, bias, first, state):
        # An input counts for the neighbour if no document begins after it here.
        tail = jnp.flip(first[:, first.shape[1] - kept :], axis=1)
        begun = jnp.cumsum(tail.astype(jnp.int32), axis=1) - tail.astype(jnp.int32)
        reaches = jnp.flip(begun == 0, axis=1)[:, :, None]  # [B, W - 1, 1]
        halo = jnp.where(reaches, x[:, x.shape[1] - kept :], jnp.zeros((), x.dtype))
        onward = [(i, i + 1) for i in range(sharding.devices - 1)]
        halo = lax.ppermute(halo, sharding.axis, onward)
        state = jnp.where(lax.axis_index(sharding.axis) == 0, state, halo)
        y, _ = _causal_conv1d(
            x,
            weight,
            bias=bias,
            is_first=first,
            initial_state=state,
            activation=activation,
            implementation=implementation,
        )
        return y

    one = sharding
    channels = PartitionSpec(one.head_axes)
    return sharding.map(
        part,
        (
            one.heads,
            PartitionSpec(None, one.head_axes),
            channels,
            one.tokens,
            PartitionSpec(one.batch_axes, None, one.head_axes),
        ),
        one.heads,
    )(x, weight, bias, is_first, initial_state)

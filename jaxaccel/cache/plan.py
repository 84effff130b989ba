"""Which layer has which cache, and the caches of the layers of one position."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.host_values import empty_on_host
from jaxaccel.cache.layer_state import (
    AttentionSpec,
    LayerState,
    Tokens,
    is_on_host,
)
from jaxaccel.cache.policy import CachePolicy


type Mode = Literal["prefill", "decode"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePlanConfig:
    """The caches of a decoder's attention layers.

    Layers that see a window only, and layers with a recurrent state, keep what they
    have under any plan.

    Attributes:
      policy: of every layer that `layers` does not name.
      layers: (index of a layer, its policy); an index counts all layers from 0, or from
        the end if it is negative.
      capacity: the most tokens a row may hold, prompt and continuation: a longer call
        is refused. Caches are as long as a call needs either way.
    """

    policy: CachePolicy = dataclasses.field(default_factory=DenseCacheConfig)
    layers: tuple[tuple[int, CachePolicy], ...] = ()
    capacity: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(map(tuple, self.layers)))
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(
                f"CachePlanConfig: capacity={self.capacity} must be positive or None"
            )
        indices = [index for index, _ in self.layers]
        for index in indices:
            if indices.count(index) > 1:
                raise ValueError(f"CachePlanConfig: layers names {index} twice")

    def policies(self, num_layers: int) -> tuple[CachePolicy, ...]:
        """The policy of each layer.

        Raises:
          ValueError: `layers` names a layer that the model does not have, or one twice.
        """
        chosen: dict[int, CachePolicy] = {}
        for index, policy in self.layers:
            place = index + num_layers if index < 0 else index
            if not 0 <= place < num_layers:
                raise ValueError(
                    f"CachePlanConfig: layers names {index}, the model has "
                    f"{num_layers} layers"
                )
            if place in chosen:
                raise ValueError(f"CachePlanConfig: layers names {place} twice")
            chosen[place] = policy
        return tuple(chosen.get(i, self.policy) for i in range(num_layers))

    def check_lengths(self, lengths: Sequence[int], new_tokens: int) -> None:
        """Refuses contexts that the caches would not hold.

        Args:
          lengths: tokens of each prompt.
          new_tokens: the most tokens that a continuation has.

        Raises:
          ValueError: names the row and the lengths.
        """
        for row, length in enumerate(lengths):
            if length == 0:
                raise ValueError(
                    f"prompts[{row}] is empty; it needs at least one token"
                )
            if self.capacity is not None and length + new_tokens > self.capacity:
                raise ValueError(
                    f"prompts[{row}] has {length} tokens, with {new_tokens} new ones "
                    f"more than the capacity={self.capacity} of the cache"
                )
        grown = [length + new_tokens for length in lengths]
        for policy in {self.policy, *(policy for _, policy in self.layers)}:
            policy.check_lengths(grown)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyCache:
    """The caches of all layers at one position of a decoder's pattern.

    Layers that follow each other with one policy are a stretch, and share a state.

    Attributes:
      states: a state for each stretch, arrays with a leading axis of its layers.
      policies: of each stretch.
      ends: index behind the last layer of each stretch.
      mode: whether the next call is a prompt, or one token a row.
    """

    states: tuple[LayerState, ...]
    policies: tuple[CachePolicy, ...] = dataclasses.field(metadata={"static": True})
    ends: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    mode: Mode = dataclasses.field(default="prefill", metadata={"static": True})

    @classmethod
    def init(
        cls,
        policies: Sequence[CachePolicy],
        spec: AttentionSpec,
        batch: int,
        max_length: int,
        dtype: DTypeLike,
    ) -> Self:
        """Makes the caches of layers before any token.

        Args:
          policies: of each layer.
          spec: the layers' attention.
          batch: rows B.
          max_length: tokens a row may hold.
          dtype: of keys and values.

        Raises:
          ValueError: a policy does not fit the layer.
          NotImplementedError: a policy cannot serve it.
        """
        ends = [
            i + 1
            for i in range(len(policies))
            if i + 1 == len(policies) or policies[i] != policies[i + 1]
        ]
        starts = [0, *ends[:-1]]
        states = []
        for start, end in zip(starts, ends, strict=True):
            policies[start].check(spec, max_length)
            sizes = (spec, batch, max_length, dtype)
            states.append(_empty_layers(policies[start], end - start, *sizes))
        return cls(
            states=tuple(states),
            policies=tuple(policies[start] for start in starts),
            ends=tuple(ends),
        )

    def as_mode(self, mode: Mode) -> Self:
        """The same, for a prompt or for single tokens."""
        return dataclasses.replace(self, mode=mode)

    def layer(self, index: jax.Array, first: int = 0) -> PolicyCacheOfLayer:
        """One layer's part, which writes into the arrays of all.

        Args:
          index: i32[], the layer.
          first: some layer of the same stretch.
        """
        stretch = next(i for i, end in enumerate(self.ends) if first < end)
        start = self.ends[stretch - 1] if stretch else 0
        return PolicyCacheOfLayer(
            whole=self, local=index.astype(jnp.int32) - start, stretch=stretch
        )

    def counters(self) -> tuple[dict[str, jax.Array], ...]:
        """What each layer's cache tells about itself, arrays [B] by name.

        See the policies' `counters`; empty where a policy counts nothing.
        """
        layers = []
        start = 0
        for policy, state, end in zip(
            self.policies, self.states, self.ends, strict=True
        ):
            told = policy.counters(state)
            layers += [{n: x[i] for n, x in told.items()} for i in range(end - start)]
            start = end
        return tuple(layers)

    def num_bytes(self) -> tuple[int, int]:
        """Bytes of all layers on the device, and in host memory."""
        device = host = 0
        for state in self.states:
            for name in state.names():
                array = getattr(state, name)
                if is_on_host(array):
                    host += array.size * array.dtype.itemsize
                else:
                    device += array.size * array.dtype.itemsize
        return device, host

    def reset(self, rows: jax.Array) -> Self:
        """Empties rows bool[B]."""
        return dataclasses.replace(
            self, states=tuple(state.reset(rows) for state in self.states)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyCacheOfLayer:
    """One layer's part of a `PolicyCache`.

    Attributes:
      whole: the caches of all layers.
      local: i32[], the layer's place in its stretch.
      stretch: which of the stretches.
    """

    whole: PolicyCache
    local: jax.Array
    stretch: int = dataclasses.field(metadata={"static": True})

    @property
    def stacked(self) -> PolicyCache:
        """The caches of all layers."""
        return self.whole

    def mix(
        self, tokens: Tokens, spec: AttentionSpec, implementation: Any = None
    ) -> tuple[jax.Array, Self]:
        """Keeps tokens and attends with them, as the cache's mode says.

        Args:
          tokens: a prompt, or T = 1.
          spec: the layer.
          implementation: of the prompt's attention.

        Returns:
          [B, T, H, K] in q's dtype, and the part with the tokens in it.

        Raises:
          ValueError: several tokens a row come in the mode "decode".
        """
        policy = self.whole.policies[self.stretch]
        state = dataclasses.replace(self.whole.states[self.stretch], index=self.local)
        if self.whole.mode == "prefill":
            # Kernels and windows count indices, which padding must not shift.
            aligned = tokens.left_aligned()
            o = tokens.in_place(policy.attend_prompt(aligned, spec, implementation))
            state = policy.prefill(state, aligned, spec)
        else:
            o, state = decode_step(policy, state, tokens, spec)
        states = list(self.whole.states)
        states[self.stretch] = dataclasses.replace(state, index=None)
        whole = dataclasses.replace(self.whole, states=tuple(states))
        return o.astype(tokens.q.dtype), dataclasses.replace(self, whole=whole)


def decode_step(
    policy: CachePolicy, state: LayerState, tokens: Tokens, spec: AttentionSpec
) -> tuple[jax.Array, LayerState]:
    """Appends, selects and attends with one token a row.

    Returns:
      f32[B, 1, H, K], and the state with the tokens in it.

    Raises:
      ValueError: there are several tokens a row.
    """
    if tokens.q.shape[1] != 1:
        raise ValueError(
            f"{type(policy).__name__}: a decoding step takes one token a row, got "
            f"T={tokens.q.shape[1]}; a prompt is read in the mode 'prefill'"
        )
    state = policy.append(state, tokens, spec)
    selection, state = policy.select(state, tokens, spec)
    o, _ = policy.attend(state, tokens, selection, spec)
    return o, state


def _empty_layers(
    policy: CachePolicy,
    count: int,
    spec: AttentionSpec,
    batch: int,
    max_length: int,
    dtype: DTypeLike,
) -> LayerState:
    """The state of `count` layers; none of it is made a layer at a time.

    What is on the host is never on the device, not even empty.
    """
    one = jax.eval_shape(lambda: policy.init(spec, batch, max_length, dtype))
    arrays = {}
    for name in one.names():
        leaf = getattr(one, name)
        shape = (count, *leaf.shape)
        if name in policy.host_names():
            arrays[name] = empty_on_host(shape, leaf.dtype)
        else:
            arrays[name] = jnp.full(shape, one.EMPTY.get(name, 0), leaf.dtype)
    return dataclasses.replace(one, **arrays)

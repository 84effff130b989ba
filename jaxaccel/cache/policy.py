"""The one interface of the caches of attention layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache.attend import prompt_attention
from jaxaccel.cache.layer_state import AttentionSpec, LayerState, Tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """What a query is to read.

    Attributes:
      ids: i32[B, G, N], units of the cache: tokens, pages or chunks.
      valid: bool[B, G, N]; false where there are fewer units than places.
      slots: i32[B, G, N], where the values of the units are, for caches that hold only
        some of them on the device; `None` otherwise.
    """

    ids: jax.Array
    valid: jax.Array
    slots: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePolicy:
    """How an attention layer keeps its past, and what of it a query reads.

    A policy is a frozen config; what it keeps is a `LayerState`, a pytree whose shapes
    never change, so that a whole decode is one program. A row is one document.

    A prompt is one call of `prefill`; from then on, each token is one call of
    `append`, `select` and `attend`, in that order. Which of the two a call is, the
    caller says, and not the number of its tokens.

    Attributes:
      prefill_budget: tokens that a query of the prompt sees, of which the first
        `prefill_sinks` of the row; `None` for all before it.
      prefill_sinks: see there.
    """

    prefill_budget: int | None = None
    prefill_sinks: int = 4

    def __post_init__(self):
        budget, sinks = self.prefill_budget, self.prefill_sinks
        if sinks < 0:
            raise ValueError(
                f"{type(self).__name__}: prefill_sinks={sinks} must not be negative"
            )
        if budget is not None and budget <= sinks:
            raise ValueError(
                f"{type(self).__name__}: prefill_budget={budget} must be above "
                f"prefill_sinks={sinks}"
            )

    def _require_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{type(self).__name__}: {name}={getattr(self, name)} must be "
                    "positive"
                )

    def check(self, spec: AttentionSpec, max_length: int) -> None:
        """Refuses a layer that the policy cannot serve.

        Raises:
          ValueError: a setting does not fit the layer.
          NotImplementedError: the policy cannot serve such layers.
        """

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Refuses rows that would grow beyond what the policy can hold.

        Args:
          lengths: tokens of each row, in the end.

        Raises:
          ValueError: names the numbers.
        """

    def host_names(self) -> tuple[str, ...]:
        """Names of the state's arrays that are in host memory."""
        return ()

    def host_bytes(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> int:
        """Bytes of host memory that one layer's state takes."""
        del spec, batch, max_length, dtype
        return 0

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> LayerState:
        """Makes the state of a layer before any token.

        Args:
          spec: the layer.
          batch: rows B.
          max_length: tokens a row may hold, over all calls.
          dtype: of keys and values.

        Returns:
          The state; every array holds one value, which `LayerState.EMPTY` names.
        """
        raise NotImplementedError

    def attend_prompt(
        self, tokens: Tokens, spec: AttentionSpec, implementation: Any = None
    ) -> jax.Array:
        """Attention of the prompt over itself, [B, T, H, K] in q's dtype."""
        return prompt_attention(
            tokens,
            spec,
            budget=self.prefill_budget,
            num_sinks=self.prefill_sinks,
            implementation=implementation,
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """Keeps the prompt.

        Args:
          state: as `init` made it.
          tokens: the prompt; each row's real tokens stand in front of its padding, see
            `Tokens.left_aligned`. A row may have none.
          spec: the layer.

        Raises:
          ValueError: T is more than the state has room for.
        """
        raise NotImplementedError

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """Keeps one token a row, T = 1; padding changes nothing.

        Tokens past the last slot are lost: shapes are static, so it is the caller who
        must not exceed `max_length`.

        Args:
          state: of one layer, or of several with `index`.
          tokens: q [B, 1, H, K]; k, v [B, 1, G, K].
          spec: the layer.

        Returns:
          The state with the tokens in it.
        """
        raise NotImplementedError

    def select(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> tuple[Selection | None, LayerState]:
        """Chooses what the tokens just appended read; `None` is all that is held."""
        del tokens, spec
        return None, state

    def counters(self, state: LayerState) -> dict[str, jax.Array]:
        """What a state tells about itself, by name.

        Args:
          state: of several layers, as in `PolicyCache`.

        Returns:
          Arrays [layers, B].
        """
        del state
        return {}

    def attend(
        self,
        state: LayerState,
        tokens: Tokens,
        selection: Selection | None,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention over what was chosen.

        Returns:
          f32[B, 1, H, K] and its log-sum-exp f32[B, 1, H]; those of padding mean
          nothing.
        """
        raise NotImplementedError


def check_room(policy: CachePolicy, time: int, room: int, what: str) -> None:
    """Refuses a prompt that is longer than the cache.

    Raises:
      ValueError: names both lengths.
    """
    if time > room:
        raise ValueError(
            f"{type(policy).__name__}: the prompt has T={time} tokens, more than the "
            f"{room} {what} of the cache"
        )


def padded_to(x: jax.Array, size: int, axis: int, value: Any = 0) -> jax.Array:
    """x with `value` behind it up to `size` along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)

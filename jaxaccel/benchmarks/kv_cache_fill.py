"""Caches that hold a long context, made on the device without reading one.

Keys, values and all that is derived from them are random numbers of the size that a
model's would have. What a step reads, copies and computes is that of a real context;
what it attends to means nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.cache.full import FullState
from jaxaccel.cache.layer_state import is_on_host
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.policy import CachePolicy
from jaxaccel.cache.quest import QuestCacheConfig, QuestState
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.cache.shadowkv_state import ShadowKVState


_SPREAD = {"basis": 0.1, "a": 3.0}
"""Of random numbers, 1 where not named: keys are sums over the basis."""


def fill(cache: PolicyCache, context: int, seed: int) -> PolicyCache:
    """Fills empty caches of one policy.

    Args:
      cache: of layers that share a policy, as `PolicyCache.init` made it; its arrays
        are used up.
      context: tokens that every row then holds.
      seed: of the numbers.

    Returns:
      The cache, ready for single tokens.

    Raises:
      NotImplementedError: the policy is none of dense, Quest and ShadowKV.
    """
    (policy,), (state,) = cache.policies, cache.states
    key = jax.random.key(seed)
    layers = cache.ends[-1]
    if not isinstance(state, FullState | ShadowKVState):
        raise NotImplementedError(
            f"{type(policy).__name__}: only dense, Quest and ShadowKV are filled"
        )
    names = [
        name
        for name in ("k", "v", "basis", "a", "landmark", "values", "out_k", "out_v")
        if name in state.names()
    ]
    names += [name for name in ("ring_k", "ring_v", "ring_a") if name in state.names()]
    for number, name in enumerate(names):
        of_name = jax.random.fold_in(key, number)
        for layer in range(layers):
            # A row at a time: no second copy of anything large is ever alive.
            for row in range(getattr(state, name).shape[1]):
                array = _draw(
                    getattr(state, name), of_name, layer, row, _SPREAD.get(name, 1.0)
                )
                state = dataclasses.replace(state, **{name: array})
    state = dataclasses.replace(state, **_settled(policy, state, context))
    return dataclasses.replace(cache, states=(state,)).as_mode("decode")


@functools.partial(jax.jit, donate_argnums=0)
def _draw(
    array: jax.Array, key: jax.Array, layer: Any, row: Any, spread: Any
) -> jax.Array:
    """Random numbers in one row of one layer's array."""
    key = jax.random.fold_in(jax.random.fold_in(key, layer), row)
    drawn = jax.random.bits(key, array.shape[2:], jnp.uint16)
    # Even numbers of deviation 1 are as good here, and cheap.
    number = drawn.astype(jnp.float32) * (12**0.5 / 65536) - 3**0.5
    block = (number * spread)[None, None].astype(array.dtype)
    if is_on_host(array):
        block = jax.device_put(block, jax.memory.Space.Host)
    at = (jnp.int32(layer), jnp.int32(row), *[jnp.int32(0)] * (array.ndim - 2))
    return jax.lax.dynamic_update_slice(array, block, at)


def _settled(
    policy: CachePolicy, state: FullState | ShadowKVState, context: int
) -> dict[str, jax.Array]:
    """What is no random number: lengths, places, bounds of pages."""
    arrays = {"length": jnp.full_like(state.length, context)}
    if isinstance(state, QuestState) and isinstance(policy, QuestCacheConfig):
        low, high = _page_bounds(state.low, state.high, state.k, policy.page, context)
        arrays |= {"low": low, "high": high}
    if isinstance(state, ShadowKVState) and isinstance(policy, ShadowKVCacheConfig):
        arrays |= _shadowkv_places(policy, state, context)
    return arrays


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=(0, 1))
def _page_bounds(
    low: jax.Array, high: jax.Array, k: jax.Array, page: int, context: int
) -> tuple[jax.Array, jax.Array]:
    """The smallest and largest keys of the pages that are full."""
    layers, batch = k.shape[:2]
    full = context // page

    def one(i, bounds):
        layer, row = i // batch, i % batch
        keys = k[layer, row, :, : full * page]
        keys = keys.reshape(keys.shape[0], full, page, keys.shape[-1])

        def put(array, bound):
            at = (layer, row, 0, 0, 0)
            return jax.lax.dynamic_update_slice(array, bound[None, None], at)

        low, high = bounds
        return put(low, keys.min(axis=2)), put(high, keys.max(axis=2))

    return jax.lax.fori_loop(0, layers * batch, one, (low, high))


def _shadowkv_places(
    policy: ShadowKVCacheConfig, state: ShadowKVState, context: int
) -> dict[str, Any]:
    """Which chunks there are, and which of them are outliers."""
    layers, batch, heads, places = state.excluded.shape
    c = policy.chunk
    kept = context // c - policy.local_window // c
    outliers = min(policy.num_outliers, kept, state.out_k.shape[3])
    number = jnp.arange(places, dtype=jnp.int32)
    # Outliers spread over the context; which they are changes no time.
    apart = max(kept // max(outliers, 1), 1)
    is_outlier = (number % apart == 0) & (number // apart < outliers)
    excluded = (number >= kept) | is_outlier
    row = jnp.full((layers, batch), 0, jnp.int32)
    return {
        "excluded": jnp.broadcast_to(excluded, (layers, batch, heads, places)),
        "first": jnp.broadcast_to(number * c, (layers, batch, places)),
        "out_count": row + outliers,
        "rank_used": row + state.basis.shape[-1],
        "start": row + kept * c,
        "seen_start": row + kept * c,
        "seen_outliers": row + outliers,
        "next_chunk": jnp.full((layers,), context // c, jnp.int32),
    }

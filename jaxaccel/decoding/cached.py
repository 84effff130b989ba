"""A decoder's caches by a plan: making them, and reading prompts into them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.host_values import check_host_budget
from jaxaccel.cache.plan import CachePlanConfig, Mode, PolicyCache
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.nn.attention import Attention


def init_cache(
    model: Any,
    plan: CachePlanConfig,
    batch: int,
    max_length: int,
    dtype: DTypeLike | None = None,
) -> DecoderCache:
    """Makes an empty cache; not inside of `jax.jit`, for what is in host memory.

    Args:
      model: a `Decoder`.
      plan: the caches of its attention layers; those that see a window only, and
        layers with a recurrent state, have what `Decoder.init_cache` gives them.
      batch: rows B.
      max_length: tokens a row may hold, over all calls.
      dtype: of keys, values and convolution states, the compute dtype by default.

    Returns:
      The cache, in the mode "prefill".

    Raises:
      ValueError: a policy does not fit its layer, the plan names layers that are not
        there or have no such cache, or the host's memory would not hold the values.
      NotImplementedError: a policy cannot serve its layer.
    """
    config = model.config
    dtype = config.compute_dtype if dtype is None else jnp.dtype(dtype)
    policies = plan.policies(config.num_layers)
    rows: dict[int, list[int]] = {}
    for layer, (place, _) in enumerate(config.layer_places):
        rows.setdefault(place, []).append(layer)
    planned = {
        place: tuple(policies[layer] for layer in layers)
        for place, layers in rows.items()
        if _is_planned(model.layers[place].mixer)
    }
    for index, _ in plan.layers:
        place, _ = config.layer_places[index]
        if place not in planned:
            raise ValueError(
                f"CachePlanConfig: layers names {index}, which is no attention layer "
                "that sees all tokens"
            )
    _check_host(model, planned, batch, max_length, dtype)
    mixing = [i for i, block in enumerate(model.layers) if block.mixer is not None]
    skipped = tuple(i in planned for i in mixing)
    graphdef, state = nnx.split(model)
    cache = _without(graphdef, skipped, batch, max_length, dtype, state)
    layers = tuple(
        PolicyCache.init(
            planned[place],
            model.layers[place].mixer.cache_spec,
            batch,
            max_length,
            dtype,
        )
        if place in planned
        else layer
        for place, layer in zip(mixing, cache.layers, strict=True)
    )
    return dataclasses.replace(cache, layers=layers)


def read_prompts(
    model: Any, tokens: jax.Array, segments: jax.Array, cache: DecoderCache
) -> tuple[jax.Array, DecoderCache]:
    """Reads the prompts, one a row, and makes the cache ready for single tokens.

    Args:
      model: a `Decoder`.
      tokens: i32[B, T].
      segments: i32[B, T], 1 on real tokens, 0 on padding; a row may be all padding.
      cache: as `init_cache` made it.

    Returns:
      [B, T, D] after the final norm, and the cache in the mode "decode".

    Raises:
      ValueError: T is more than a cache has room for.
    """
    hidden, cache = read_tokens(model, tokens, segments, as_mode(cache, "prefill"))
    return hidden, as_mode(cache, "decode")


def as_mode(cache: DecoderCache, mode: Mode) -> DecoderCache:
    """The cache for a prompt or for single tokens; how long either is says nothing."""
    layers = tuple(
        layer.as_mode(mode) if isinstance(layer, PolicyCache) else layer
        for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers)


def _is_planned(mixer: Any) -> bool:
    return isinstance(mixer, Attention) and mixer.config.window is None


def _check_host(
    model: Any, planned: dict[int, Any], batch: int, max_length: int, dtype: DTypeLike
) -> None:
    needed = sum(
        policy.host_bytes(
            model.layers[place].mixer.cache_spec, batch, max_length, dtype
        )
        for place, policies in planned.items()
        for policy in policies
    )
    if needed:
        what = f"the values of {batch} rows of {max_length} tokens"
        check_host_budget(needed, what)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _without(
    graphdef: Any,
    skipped: tuple[bool, ...],
    batch: int,
    max_length: int,
    dtype: Any,
    state: Any,
) -> DecoderCache:
    """`Decoder.init_cache` with `None` for the layers that a plan gives caches to."""
    cache = nnx.merge(graphdef, state).init_cache(batch, max_length, dtype)
    layers = zip(skipped, cache.layers, strict=True)
    layers = tuple(None if skip else layer for skip, layer in layers)
    return dataclasses.replace(cache, layers=layers)

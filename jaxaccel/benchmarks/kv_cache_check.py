"""Whether a cache with the kernels that it names reads what it reads without them.

A time says nothing of a kernel that returns zeros, and neither do hidden states: over a
long context of random numbers attention is small beside the rest of a layer, and a
chunk that rounding puts behind another one would change them as much. So one layer's
step is compared: which units it chose, and its attention over just these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.benchmarks.guards import require_kernels
from jaxaccel.benchmarks.kv_cache_fill import fill
from jaxaccel.cache.layer_state import AttentionSpec, Tokens
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.policy import CachePolicy, Selection
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from pallas_kernels._common.dispatch import Choice
from pallas_kernels._common.testing import RELATIVE, relative_error


OPS = (
    "decode_attention",
    "host_gather",
    "landmark_scores",
    "sparse_decode_attention",
    "top_k_select",
)
"""What caches may name; the kernel of an op is "pk_" and its name."""

SAME_UNITS = 0.98
"""Chosen units that must be the same: scores are equal up to their rounding."""


class WrongResult(RuntimeError):
    """A cache does not read what it would read without the kernels that it names."""


def require_named(text: str, choices: Iterable[Choice]) -> None:
    """Fails unless a program launches the kernels that its cache names.

    Args:
      text: `as_text()` of what was lowered or compiled.
      choices: what was recorded while it was traced.

    Raises:
      KernelMissing: some are not there.
    """
    names = {
        f"pk_{choice.op}"
        for choice in choices
        if choice.op in OPS
        and choice.source == "named"
        and choice.implementation == "mosaic"
    }
    require_kernels(text, sorted(names))


def without_kernels(
    policy: CachePolicy, spec: AttentionSpec
) -> tuple[CachePolicy, AttentionSpec]:
    """The same cache in plain JAX or with ops at "xla", and all on the device."""
    spec = dataclasses.replace(spec, decode=None)
    if isinstance(policy, ShadowKVCacheConfig):
        # Values are read where they all are; no slot, none of the host's memory.
        policy = dataclasses.replace(
            policy,
            values="device",
            slots=None,
            fetch="xla",
            landmarks="xla",
            top_k="xla",
            attention=None,
        )
    return policy, spec


def compare_step(
    policy: CachePolicy,
    spec: AttentionSpec,
    layers: int,
    batch: int,
    context: int,
    room: int,
    dtype: Any,
    seed: int,
) -> dict[str, float]:
    """Compares a step of the last layer with that of the cache `without_kernels`.

    Args:
      policy: of all layers.
      spec: of a layer.
      layers: how many there are.
      batch: rows.
      context: tokens that every row holds.
      room: tokens that it may hold.
      dtype: of the cache, and of what the layer is given.
      seed: of all that is drawn.

    Returns:
      `same_units`, the share of chosen units that both chose, 1 where nothing is
      chosen, and `output_error`, the relative error of attention's output over the
      units that `policy` chose; of the worst row of each.

    Raises:
      WrongResult: either is worse than rounding explains, or not a number.
    """
    dtype = jnp.dtype(dtype)
    tokens = _tokens(spec, batch, context, dtype, seed)
    plain, plain_spec = without_kernels(policy, spec)
    sizes = (layers, batch, context, room, dtype, seed)
    # Else a GPU's products of f32 would be less than the limit asks for.
    with jax.default_matmul_precision("highest"):
        found, output = _step(policy, spec, sizes, tokens, None)
        own, expected = _step(plain, plain_spec, sizes, tokens, found)
    same = 1.0
    if found is not None and own is not None:
        same = _same_units(found, own)
    rows = zip(list(output), list(expected), strict=True)
    error = float(np.max([relative_error(*row) for row in rows]))  # NaN stays
    limit = 4 * RELATIVE[dtype.name]  # as of the worst block in tests of the ops
    # Written so that NaN fails.
    if not (same >= SAME_UNITS and error <= limit):
        raise WrongResult(
            f"{100 * same:.1f} % of the chosen units are those chosen without kernels, "
            f"at least {100 * SAME_UNITS:.0f} % must be; attention over them has the "
            f"relative error {error:.3g}, limit {limit:.3g}"
        )
    return {"same_units": same, "output_error": error}


def _tokens(
    spec: AttentionSpec, batch: int, context: int, dtype: jnp.dtype, seed: int
) -> Tokens:
    """One random token a row."""
    keys = iter(jax.random.split(jax.random.key(seed + 1), 3))
    q, k, v = (
        jax.random.normal(next(keys), (batch, 1, heads, spec.head_dim)).astype(dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    positions = jnp.full((batch, 1), context, jnp.int32)
    is_real = jnp.ones((batch, 1), bool)
    return Tokens(q_pre=q, k_pre=k, q=q, k=k, v=v, positions=positions, is_real=is_real)


def _step(
    policy: CachePolicy,
    spec: AttentionSpec,
    sizes: tuple[int, int, int, int, jnp.dtype, int],
    tokens: Tokens,
    given: Selection | None,
) -> tuple[Selection | None, np.ndarray]:
    """Fills a cache and lets its last layer read a token a row.

    Returns:
      What it chose, and f64[B, 1, H, K], attention over `given` where that is not
      `None`.
    """
    layers, batch, context, room, dtype, seed = sizes
    cache = PolicyCache.init([policy] * layers, spec, batch, room, dtype)
    (state,) = fill(cache, context, seed).states
    del cache

    # The state is used up and comes back, as in a decode: no copy of it is made.
    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, index, tokens, given):
        state = dataclasses.replace(state, index=index)
        state = policy.append(state, tokens, spec)
        chosen, state = policy.select(state, tokens, spec)
        units = None if chosen is None else (chosen.ids, chosen.valid)
        if given is not None:
            chosen = Selection(ids=given[0], valid=given[1])
        output, _ = policy.attend(state, tokens, chosen, spec)
        return dataclasses.replace(state, index=None), units, output

    # Only what may be compared is handed over: slots are a cache's own.
    handed = None if given is None else (given.ids, given.valid)
    _, units, output = run(state, jnp.int32(layers - 1), tokens, handed)
    chosen = None if units is None else Selection(ids=units[0], valid=units[1])
    return chosen, np.asarray(output, np.float64)


def _same_units(found: Selection, own: Selection) -> float:
    """Of all units that either chose what both chose, in the worst row and head."""
    shares = []
    arrays = (found.ids, found.valid, own.ids, own.valid)
    for ids, valid, other, other_valid in zip(
        *(np.asarray(x).reshape(-1, x.shape[-1]) for x in arrays), strict=True
    ):
        have, wanted = set(ids[valid].tolist()), set(other[other_valid].tolist())
        shares.append(len(have & wanted) / max(len(have | wanted), 1))
    return min(shares)

"""The public functions: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.gated_delta_rule import (
    checks,
    config_mosaic,
    reference,
    tables,
    xla,
)
from pallas_kernels.gated_delta_rule.config import heuristic


def refusals(k: Any, v: Any, chunk_size: int) -> dict[str, str]:
    """Why the kernels cannot run keys [B, T, Hk, K] and values [B, T, Hv, V]."""
    if not (hw.is_hopper() or interpret.is_interpreting()):
        backend = jax.default_backend()
        return {"mosaic": f"the kernels need a Hopper GPU, this is {backend}"}
    reason = config_mosaic.refusal(
        time=k.shape[1],
        key_heads=k.shape[2],
        value_heads=v.shape[2],
        key_dim=k.shape[3],
        value_dim=v.shape[3],
        chunk=chunk_size,
        dtype=v.dtype,
    )
    return {"mosaic": reason} if reason else {}


def choose(
    q: Any,
    k: Any,
    v: Any,
    *args: Any,
    chunk_size: int = config_mosaic.CHUNK,
    config: config_mosaic.Config | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `gated_delta_rule` would run.

    Args:
      q, k, v, *args: arrays or `jax.ShapeDtypeStruct`, as for `gated_delta_rule`.
      chunk_size: tokens per chunk.
      config: launch parameters of "mosaic"; `None` for those of these sizes.
      implementation: the one asked for.
      **options: the other keywords of `gated_delta_rule`.

    Returns:
      The choice.

    Raises:
      ValueError: `config` is given and an implementation that has none is named.
      NotImplementedError: the named implementation cannot run this call.
    """
    del args, options  # "xla" and "reference" run everything that passes the checks.
    if config is not None and implementation in ("xla", "reference"):
        raise ValueError(
            f'config={config} is for "mosaic", implementation={implementation!r} has '
            "none"
        )
    refused = refusals(q, v, chunk_size)
    if not refused and config is None:
        config = config_mosaic.heuristic(config_mosaic.shapes_of(q, v))
    return select(
        "gated_delta_rule",
        implementation,
        refused,
        only_named=_only_named(k.shape[3], v.shape[3]),
        config=config,
    )


def _only_named(key_dim: int, value_dim: int) -> dict[str, str]:
    """Why the kernels run if they are asked for only."""
    dims = (key_dim, value_dim)
    if dims != (config_mosaic.HEAD_DIM, config_mosaic.HEAD_DIM):
        return {
            "mosaic": f"no measured row speaks for K = {key_dim}, V = {value_dim} yet"
        }
    return {}


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    is_first: jax.Array | None = None,
    starts: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    config: config_mosaic.Config | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over a sequence (Yang et al. 2024, arXiv 2412.06464).

    With S the state of a value head, S <- e^g S, then S <- S + beta (v - S k) k^T,
    then o = scale S q. Value head h reads key head h // (Hv / Hk). The state, the
    gates and every sum are f32; products take operands of v's dtype.

    Args:
      q: [B, T, Hk, K], l2-normalised by the caller, dtype of v.
      k: [B, T, Hk, K], l2-normalised by the caller, dtype of v. Keys much longer
        than 1 make the recurrence itself diverge.
      v: [B, T, Hv, V].
      g: f32[B, T, Hv], natural logarithm of the decay, <= 0.
      beta: f32[B, T, Hv], writing strength.
      is_first: bool[B, T], whether the state restarts from zero before a token.
      starts: i32[B, T], the same as `document_starts(is_first, chunk_size)` gives it:
        built once per batch it serves every layer. Give one of the two or neither.
      initial_state: f32[B, Hv, V, K], zeros if `None`.
      scale: factor on the output, K ** -0.5 if `None`.
      chunk_size: tokens per chunk of the chunked forms, a power of two >= 16.
      config: launch parameters of "mosaic", `None` for those of these sizes. With
        more than one of its `segments`, results depend on where their borders fall.
        Not used if `implementation=None` takes another one.
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has K of 64
        or 128 and V of 64, 128 or 256, chunks of 64 tokens, bf16 or f16, and 1 to 4
        value heads per key head (1 or 2 with V = 256); any T >= 1 (padded to chunks)
        and documents that begin anywhere. `None` takes it with K = V = 128.

    Returns:
      (o [B, T, Hv, V] of v's dtype, final_state f32[B, Hv, V, K]). Tokens with g = 0
      and beta = 0, such as padding, leave the state as it is.

    Raises:
      ValueError: a shape, dtype or chunk size is not allowed, both `is_first` and
        `starts` are given, or `config` has more segments than rows have chunks or
        comes with a name other than "mosaic".
      NotImplementedError: the named implementation cannot run this call.
    """
    batch, time = checks.tokens(q, k, v, g, beta)
    key_dim, (value_heads, value_dim) = k.shape[3], v.shape[2:]
    checks.chunk_size(chunk_size)
    checks.documents((batch, time), is_first, starts)
    if is_first is None:
        is_first = jnp.zeros((batch, time), bool)
        if starts is not None:
            is_first = tables.first_tokens(starts, chunk_size)
    shape = (batch, value_heads, value_dim, key_dim)
    if initial_state is None:
        initial_state = jnp.zeros(shape, jnp.float32)
    checks.expect("initial_state", initial_state, shape, jnp.float32)
    scale = key_dim**-0.5 if scale is None else scale
    choice = choose(
        q, k, v, chunk_size=chunk_size, config=config, implementation=implementation
    )
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.gated_delta_rule import mosaic

        if starts is None:
            starts = tables.document_starts(is_first, chunk_size)
        return mosaic.gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            starts=starts,
            initial_state=initial_state,
            scale=scale,
            config=choice.config,
        )
    rest: dict[str, Any] = {
        "is_first": is_first,
        "initial_state": initial_state,
        "scale": scale,
    }
    if choice.implementation == "reference":
        return reference.gated_delta_rule(q, k, v, g, beta, **rest)
    sizes = heuristic(
        batch=batch,
        time=time,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        itemsize=v.dtype.itemsize,
        chunk=chunk_size,
    )
    return xla.gated_delta_rule(q, k, v, g, beta, config=sizes, **rest)

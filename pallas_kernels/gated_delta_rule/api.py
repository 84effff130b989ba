"""The public functions: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.gated_delta_rule import config_mosaic, reference, tables, xla
from pallas_kernels.gated_delta_rule.config import heuristic


_STEP_AVAILABLE: tuple[Implementation, ...] = ("xla", "reference")


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
    """
    del args, options  # "xla" and "reference" run everything that passes the checks.
    refused = {}
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := config_mosaic.refusal(
        time=q.shape[1],
        key_heads=q.shape[2],
        value_heads=v.shape[2],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        chunk=chunk_size,
        dtype=v.dtype,
    ):
        refused["mosaic"] = reason
    elif config is None:
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


def _expect(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name} has dtype {array.dtype}, expected {jnp.dtype(dtype)}")


def _check_heads(k: Any, v: Any) -> None:
    if v.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"v has {v.shape[-2]} heads, which is no multiple of the "
            f"{k.shape[-2]} heads of k"
        )
    if not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(f"v has dtype {v.dtype}, expected a floating one")


def _check_documents(
    shape: tuple[int, int], is_first: jax.Array | None, starts: jax.Array | None
) -> None:
    if is_first is not None and starts is not None:
        raise ValueError("is_first and starts say the same, give one of them")
    if is_first is not None:
        _expect("is_first", is_first, shape, jnp.bool_)
    if starts is not None:
        _expect("starts", starts, shape, jnp.int32)


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
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has K of 64
        or 128 and V of 64, 128 or 256, chunks of 64 tokens, bf16 or f16, and 1 to 4
        value heads per key head (1 or 2 with V = 256); any T >= 1 (padded to chunks)
        and documents that begin anywhere. `None` takes it with K = V = 128.

    Returns:
      (o [B, T, Hv, V] of v's dtype, final_state f32[B, Hv, V, K]). Tokens with g = 0
      and beta = 0, such as padding, leave the state as it is.

    Raises:
      ValueError: a shape, dtype or chunk size is not allowed, both `is_first` and
        `starts` are given, or `config` has more segments than rows have chunks.
      NotImplementedError: the named implementation cannot run this call.
    """
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"q and v have shapes {q.shape} and {v.shape}, expected four axes each"
        )
    batch, time, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    _expect("q", q, (batch, time, key_heads, key_dim), v.dtype)
    _expect("k", k, q.shape, v.dtype)
    _expect("v", v, (batch, time, value_heads, value_dim), v.dtype)
    _check_heads(k, v)
    _expect("g", g, (batch, time, value_heads), jnp.float32)
    _expect("beta", beta, (batch, time, value_heads), jnp.float32)
    if chunk_size < 16 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}, expected a power of two >= 16")
    _check_documents((batch, time), is_first, starts)
    if is_first is None:
        is_first = jnp.zeros((batch, time), bool)
        if starts is not None:
            is_first = tables.first_tokens(starts, chunk_size)
    shape = (batch, value_heads, value_dim, key_dim)
    if initial_state is None:
        initial_state = jnp.zeros(shape, jnp.float32)
    _expect("initial_state", initial_state, shape, jnp.float32)
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


def gated_delta_rule_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of `gated_delta_rule`, for decoding.

    Args:
      q, k: [B, Hk, K], l2-normalised by the caller, dtype of v.
      v: [B, Hv, V].
      g, beta: f32[B, Hv].
      state: f32[B, Hv, V, K].
      scale: factor on the output, K ** -0.5 if `None`.
      implementation: "xla", "reference" or `None`.

    Returns:
      (o [B, Hv, V] of v's dtype, the new state f32[B, Hv, V, K]).

    Raises:
      ValueError: a shape or dtype is not allowed.
    """
    choice = select(
        "gated_delta_rule_step", implementation, {}, available=_STEP_AVAILABLE
    )
    if q.ndim != 3 or v.ndim != 3:
        raise ValueError(
            f"q and v have shapes {q.shape} and {v.shape}, expected three axes each"
        )
    batch, _, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    _expect("q", q, q.shape, v.dtype)
    _expect("k", k, q.shape, v.dtype)
    _expect("v", v, (batch, value_heads, value_dim), v.dtype)
    _check_heads(k, v)
    _expect("g", g, (batch, value_heads), jnp.float32)
    _expect("beta", beta, (batch, value_heads), jnp.float32)
    _expect("state", state, (batch, value_heads, value_dim, key_dim), jnp.float32)
    scale = key_dim**-0.5 if scale is None else scale
    if choice.implementation == "xla":
        return xla.step(q, k, v, g, beta, state, scale=scale)
    group = value_heads // q.shape[1]
    q32, k32 = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (q, k))
    o, state = reference.step(
        q32, k32, v.astype(jnp.float32), g, beta, state, scale=scale
    )
    return o.astype(v.dtype), state

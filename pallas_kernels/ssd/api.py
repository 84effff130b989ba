"""The public functions: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.gated_delta_rule import checks, tables
from pallas_kernels.gated_delta_rule.checks import expect as _expect
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK
from pallas_kernels.ssd import config_mosaic, reference, xla
from pallas_kernels.ssd.config import heuristic


LEAST_TIME = 1024
"""Tokens of a row from which `None` takes the kernels; the rows have 8192."""


def _refusals(x: Any, b: Any, chunk_size: int) -> dict[str, str]:
    """Why the kernels cannot run x [B, T, H, V] or [B, H, V] with b alike."""
    if x.ndim == 3:
        return {"mosaic": "the kernel of a token is pallas_kernels.ssd_step"}
    if not (hw.is_hopper() or interpret.is_interpreting()):
        backend = jax.default_backend()
        return {"mosaic": f"the kernels need a Hopper GPU, this is {backend}"}
    reason = config_mosaic.refusal(x, b, chunk_size)
    return {"mosaic": reason} if reason else {}


def choose(
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    *args: Any,
    chunk_size: int = CHUNK,
    config: config_mosaic.Config | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `ssd` or `ssd_step` would run.

    Args:
      x, dt, a, b, *args: arrays or `jax.ShapeDtypeStruct`, as for the call.
      chunk_size: tokens per chunk.
      config: launch parameters of "mosaic"; `None` for the default ones.
      implementation: the one asked for.
      **options: the call's other keywords.

    Returns:
      The choice.

    Raises:
      ValueError: `config` is given and an implementation that has none is named.
      NotImplementedError: the named implementation cannot run this call.
    """
    del dt, a, args, options  # "xla" and "reference" run all that passes the checks.
    if config is not None and implementation in ("xla", "reference"):
        raise ValueError(
            f'config={config} is for "mosaic", implementation={implementation!r} has '
            "none"
        )
    only_named = {}
    if x.ndim == 4 and x.shape[1] < LEAST_TIME:
        only_named["mosaic"] = f"T is below {LEAST_TIME}, far from any measured row"
    return select(
        "ssd",
        implementation,
        _refusals(x, b, chunk_size),
        only_named=only_named,
        config=config_mosaic.Config() if config is None else config,
    )


def _check(x: Any, dt: Any, a: Any, b: Any, c: Any) -> None:
    for name, array in (("x", x), ("b", b)):
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}, expected four axes")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x has dtype {x.dtype}, expected a floating one")
    batch, time, heads, _ = x.shape
    groups, size = b.shape[2:]
    if groups < 1 or heads % groups:
        raise ValueError(
            f"x has {heads} heads, which is no multiple of the {groups} groups of b"
        )
    _expect("b", b, (batch, time, groups, size), x.dtype)
    _expect("c", c, (batch, time, groups, size), x.dtype)
    _expect("dt", dt, (batch, time, heads), jnp.float32)
    _expect("a", a, (heads,), jnp.float32)


def check_limit(dt_limit: tuple[float, float]) -> None:
    """Raises `ValueError` unless 0 <= low < high."""
    low, high = dt_limit
    if not 0 <= low < high:
        raise ValueError(f"dt_limit is {dt_limit}, expected 0 <= low < high")


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    d: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    dt_limit: tuple[float, float] = reference.NO_LIMIT,
    is_first: jax.Array | None = None,
    starts: jax.Array | None = None,
    is_real: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    chunk_size: int = CHUNK,
    config: config_mosaic.Config | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Mamba-2's state space duality over a sequence (Dao and Gu 2024).

    With s = clip(softplus(dt + dt_bias), *dt_limit) and S the state of a head,
    S <- e^(s a) S + s x b^T, then y = S c + d x. Head h reads group h // (H / G) of b
    and c. The state, step sizes, decays and every sum are f32; products take operands
    of x's dtype.

    Args:
      x: [B, T, H, V], any float dtype.
      dt: f32[B, T, H], before bias and softplus.
      a: f32[H], <= 0, the rate at which a head forgets.
      b: [B, T, G, N], what is written along, dtype of x.
      c: [B, T, G, N], what is read along, dtype of x.
      d: f32[H], of the skip, `None` for none.
      dt_bias: f32[H], zero if `None`.
      dt_limit: least and largest step size; the same for `ssd_step`.
      is_first: bool[B, T], whether the state restarts from zero before a token.
      starts: i32[B, T], the same as `document_starts(is_first, 64)` of
        `gated_delta_rule` gives it: built once per batch it serves every layer. Give
        one of the two or neither.
      is_real: bool[B, T], false on padding, which leaves the state as it is.
      initial_state: f32[B, H, V, N], zeros if `None`.
      chunk_size: tokens per chunk of the chunked form, a power of two >= 16.
      config: launch parameters of "mosaic", `None` for the default ones. With more
        than one of its `segments`, results depend on where their borders fall.
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has V = 64,
        N = 128, an even number of heads per group, chunks of 64 or 128 tokens, bf16
        or f16, any T >= 1 (padded to 128 tokens) and documents that begin anywhere.
        `None` does not take it yet.

    Returns:
      (y [B, T, H, V] of x's dtype, final_state f32[B, H, V, N]).

    Raises:
      ValueError: a shape, dtype, limit or chunk size is not allowed, both `is_first`
        and `starts` are given, or `config` has more segments than rows have chunks of
        64 tokens or comes with a name other than "mosaic".
      NotImplementedError: the named implementation cannot run this call.

    Source: Transformers are SSMs (arXiv 2405.21060), sections 5 and 6.
    """
    _check(x, dt, a, b, c)
    check_limit(dt_limit)
    checks.chunk_size(chunk_size)
    batch, time, heads, dim = x.shape
    for name, array in (("d", d), ("dt_bias", dt_bias)):
        if array is not None:
            _expect(name, array, (heads,), jnp.float32)
    checks.documents((batch, time), is_first, starts)
    if is_real is not None:
        _expect("is_real", is_real, (batch, time), jnp.bool_)
    if is_first is None:
        is_first = jnp.zeros((batch, time), bool)
        if starts is not None:
            is_first = tables.first_tokens(starts, CHUNK)
    shape = (batch, heads, dim, b.shape[3])
    if initial_state is None:
        initial_state = jnp.zeros(shape, jnp.float32)
    _expect("initial_state", initial_state, shape, jnp.float32)
    choice = choose(
        *(x, dt, a, b, c),
        chunk_size=chunk_size,
        config=config,
        implementation=implementation,
    )
    sizes = {"dt_bias": dt_bias, "dt_limit": dt_limit, "is_real": is_real}
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.ssd import mosaic

        if starts is None:
            starts = tables.document_starts(is_first, CHUNK)
        return mosaic.ssd(
            *(x, dt, a, b, c),
            **sizes,
            d=d,
            starts=starts,
            initial_state=initial_state,
            config=choice.config,
        )
    steps = reference.step_sizes(dt, **sizes)
    rest = {"is_first": is_first, "initial_state": initial_state}
    if choice.implementation == "reference":
        y, state = reference.ssd(x, steps, a, b, c, **rest)
    else:
        groups = heuristic(batch=batch, time=time, heads=heads, chunk=chunk_size)
        y, state = xla.ssd(x, steps, a, b, c, config=groups, **rest)
    if d is not None:
        y = y + d[None, None, :, None] * x.astype(jnp.float32)
    return y.astype(x.dtype), state


def ssd_step(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array,
    *,
    d: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    dt_limit: tuple[float, float] = reference.NO_LIMIT,
    is_first: jax.Array | None = None,
    is_real: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of `ssd`, for decoding.

    Args:
      x: [B, H, V], any float dtype.
      dt: f32[B, H], before bias and softplus.
      a: f32[H], <= 0.
      b, c: [B, G, N], dtype of x.
      state: [B, H, V, N], f32 or the narrower type that a cache holds.
      d: f32[H], of the skip `d x`.
      dt_bias, dt_limit: as for `ssd`.
      is_first: bool[B], true where a document begins.
      is_real: bool[B], false where the row has no token; its state stays.
      implementation: as for `ssd`; "xla" and "reference" are the same here, the
        recurrence in f32.

    Returns:
      (y [B, H, V] of x's dtype, state of the given state's dtype).

    Raises:
      NotImplementedError: the named implementation cannot run this call.
    """
    choose(x, dt, a, b, c, state, implementation=implementation)
    group = x.shape[1] // b.shape[1]
    dt = reference.step_sizes(dt, dt_bias, dt_limit=dt_limit, is_real=is_real)
    before = state.astype(jnp.float32)
    if is_first is not None:
        before = jnp.where(is_first[:, None, None, None], 0.0, before)
    x32 = x.astype(jnp.float32)
    b, c = (jnp.repeat(m.astype(jnp.float32), group, axis=1) for m in (b, c))
    y, after = reference.update(x32, dt, a, b, c, before)
    if d is not None:
        y = y + d[None, :, None] * x32
    return y.astype(x.dtype), after.astype(state.dtype)

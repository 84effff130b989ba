"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.engram_gate import config as configs
from pallas_kernels.engram_gate import reference, xla


_ONLY_NAMED = {"mosaic": "a row speaks for one size alone"}


def choose(
    h: Any,
    kv: Any,
    query_scale: Any,
    key_scale: Any,
    *,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `engram_gate` would run.

    Args:
      h, kv, query_scale, key_scale: arrays or `jax.ShapeDtypeStruct`, as for the
        function.
      dtype: of y.
      implementation: the one asked for.
      **options: its other keywords, which decide nothing.

    Returns:
      The choice, with `Kernels` as its config if it is "mosaic".

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    del options
    _check(h, kv, query_scale, key_scale)
    refused, kernels = {}, None
    if reason := _mosaic_refusal(h, kv, dtype):
        refused["mosaic"] = reason
    else:
        streams, dim = h.shape[2:]
        out = h.dtype if dtype is None else dtype
        bwd = None
        if configs.refusal(1, streams, dim, h.dtype, out, "bwd") is None:
            bwd = configs.pick(streams, dim, h.dtype, out, "bwd")
        kernels = configs.Kernels(
            fwd=configs.pick(streams, dim, h.dtype, out, "fwd"), bwd=bwd
        )
    return select(
        "engram_gate", implementation, refused, only_named=_ONLY_NAMED, config=kernels
    )


def _check(h: Any, kv: Any, query_scale: Any, key_scale: Any) -> None:
    if len(h.shape) != 4 or not jnp.issubdtype(h.dtype, jnp.floating):
        raise ValueError(f"h is {h.dtype}{list(h.shape)}, expected float[B, T, G, D]")
    batch, time, streams, dim = h.shape
    expected = (batch, time, streams + 1, dim)
    if kv.shape != expected or not jnp.issubdtype(kv.dtype, jnp.floating):
        raise ValueError(
            f"kv is {kv.dtype}{list(kv.shape)}, expected float{list(expected)}"
        )
    for name, scale in (("query_scale", query_scale), ("key_scale", key_scale)):
        if scale.shape != (streams, dim):
            raise ValueError(
                f"{name} has shape {list(scale.shape)}, expected {[streams, dim]}"
            )


def _mosaic_refusal(h: Any, kv: Any, dtype: DTypeLike | None) -> str | None:
    """Why the kernels cannot run these inputs, `None` if they can."""
    if not (hw.is_hopper() or interpret.is_interpreting()):
        return f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
    if kv.dtype != h.dtype:
        return f"kv.dtype={kv.dtype}, the kernels take h.dtype={h.dtype}"
    out = jnp.dtype(h.dtype if dtype is None else dtype)
    if out not in (jnp.dtype(jnp.float32), jnp.dtype(h.dtype)):
        return f"dtype={out}, the kernels take float32 or h.dtype={h.dtype}"
    batch, time, streams, dim = h.shape
    return configs.refusal(batch * time, streams, dim, h.dtype, out, "fwd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `engram_gate` was asked for, without the arrays."""

    eps: float
    clamp: float
    copies_sign: bool
    dtype: Any
    kernels: configs.Kernels | None

    def formula(self) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "clamp": self.clamp,
            "copies_sign": self.copies_sign,
        }


def engram_gate(
    h: jax.Array,
    kv: jax.Array,
    query_scale: jax.Array,
    key_scale: jax.Array,
    *,
    is_live: jax.Array | None = None,
    eps: float = 1e-6,
    clamp: float = 1e-6,
    copies_sign: bool = False,
    dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """How much of the memory each stream takes, and that much of it.

    s = <rms(h) q, rms(k) w> / sqrt(D),  gate = sigmoid(sign(s) sqrt(max(|s|, clamp))),
    y = gate v, all of it in float32. Differentiable in h, kv and the scales; no
    gradient goes through a score of at most `clamp`.

    Args:
      h: [B, T, G, D], residual streams.
      kv: [B, T, G + 1, D], a key for each stream, then the value they share.
      query_scale, key_scale: [G, D], gains q and w of the two norms.
      is_live: bool[B, T], tokens that take something; `None` for all. Others have zeros
        for y and gate, whatever h and kv hold, and zero gradients.
      eps: added to the norms' mean squares.
      clamp: smallest |s| whose root is taken; positive.
      copies_sign: whether +0 and -0 have their signs; else both give one half.
      dtype: of y, that of h by default.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      (y [B, T, G, D] in `dtype`, gate f32[B, T, G]).

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: Engram (arXiv 2601.07372), section 2; the root is that of the published
    code.
    """
    choice = choose(
        h, kv, query_scale, key_scale, dtype=dtype, implementation=implementation
    )
    batch, time = h.shape[:2]
    if is_live is not None and (
        is_live.shape != (batch, time) or is_live.dtype != jnp.bool_
    ):
        raise ValueError(
            f"is_live is {is_live.dtype}{list(is_live.shape)}, expected "
            f"bool{[batch, time]}"
        )
    if clamp <= 0:
        raise ValueError(f"clamp={clamp} must be positive: the root has no slope at 0")
    options = Options(
        eps=eps,
        clamp=clamp,
        copies_sign=copies_sign,
        dtype=jnp.dtype(h.dtype if dtype is None else dtype),
        kernels=choice.config,
    )
    if choice.implementation == "reference":
        return reference.engram_gate(
            h,
            kv,
            query_scale,
            key_scale,
            is_live=is_live,
            dtype=options.dtype,
            **options.formula(),
        )
    # JAX differentiates the product of the gains.
    gain = query_scale.astype(jnp.float32) * key_scale.astype(jnp.float32)
    return _gate(options, h, kv, gain, is_live)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gate(options: Options, h, kv, gain, is_live):
    if options.kernels is None:
        return xla.forward(
            h, kv, gain, is_live, dtype=options.dtype, **options.formula()
        )
    plan = _plan(options, h, is_live, options.kernels.fwd)
    y, gate = _kernel_module().engram_gate_fwd(
        plan, _flat(h), _flat(kv), gain, _flags(is_live)
    )
    return y.reshape(h.shape), gate.reshape(h.shape[:3])


def _gate_fwd(options: Options, h, kv, gain, is_live):
    return _gate(options, h, kv, gain, is_live), (h, kv, gain, is_live)


def _gate_bwd(options: Options, residuals, cotangents):
    h, kv, gain, is_live = residuals
    dy, dgate = cotangents
    if options.kernels is None or options.kernels.bwd is None:
        grads = xla.backward(h, kv, gain, is_live, dy, dgate, **options.formula())
        return *grads, None
    plan = _plan(options, h, is_live, options.kernels.bwd)
    dh, dkv, dgain = _kernel_module().engram_gate_bwd(
        plan, _flat(h), _flat(kv), gain, _flags(is_live), _flat(dy), _flat(dgate)
    )
    return dh.reshape(h.shape), dkv.reshape(kv.shape), dgain, None


_gate.defvjp(_gate_fwd, _gate_bwd)


def _kernel_module():
    """Imported on first use: Mosaic GPU takes a second that CPU users need not pay."""
    from pallas_kernels.engram_gate import kernel

    return kernel


def _flat(x: jax.Array) -> jax.Array:
    """[B, T, ...] to [P, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _flags(is_live: jax.Array | None) -> jax.Array | None:
    return None if is_live is None else is_live.reshape(-1).astype(jnp.int32)


def _plan(options: Options, h: jax.Array, is_live: Any, config: configs.Config):
    batch, time, streams, dim = h.shape
    return _kernel_module().Plan(
        tokens=batch * time,
        streams=streams,
        dim=dim,
        dtype=jnp.dtype(h.dtype),
        out_dtype=options.dtype,
        has_live=is_live is not None,
        config=config,
        **options.formula(),
    )

"""The public `rms_norm`: checks, dispatch, and one gradient for both fast forms."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.rms_norm import config as configs
from pallas_kernels.rms_norm import reference, xla


FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """What runs each direction: a kernel with its tiling, or XLA for `None`."""

    fwd: configs.Config | None = None
    bwd: configs.Config | None = None

    def __str__(self) -> str:
        return f"forward {self.fwd or 'xla'}, backward {self.bwd or 'xla'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `rms_norm` was asked for, without the arrays."""

    eps: float
    zero_centered: bool
    norm_before_gate: bool
    num_groups: int
    kernels: Kernels


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    gate: jax.Array | None = None,
    norm_before_gate: bool = True,
    num_groups: int = 1,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Divides by the root mean square and multiplies with a learned scale.

    y = x / sqrt(mean(x^2) + eps) * scale, with statistics in float32. With a gate,
    y * silu(gate), or the norm of x * silu(gate) if not `norm_before_gate`.
    Differentiable in x, scale and gate; the gradient of scale has one fixed order
    of summation.

    Args:
      x: [..., D], float32, bfloat16 or float16.
      scale: [D], float32 or x.dtype.
      eps: added to the mean square.
      zero_centered: multiply with 1 + scale (Gemma, Qwen3-Next).
      gate: [..., D]; passed through SiLU in float32.
      norm_before_gate: whether the gate multiplies the normed value (Gated DeltaNet)
        or what is normed (Mamba-2).
      num_groups: neighbouring channels form this many groups with their own mean.
      implementation: "reference", "xla", "mosaic"; `None` takes the best that can.

    Returns:
      [..., D] in x.dtype.

    Raises:
      ValueError: shapes do not match, or D is no multiple of `num_groups`.
      NotImplementedError: the named implementation cannot run this call.

    References:
      Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    arguments = {
        "eps": eps,
        "zero_centered": zero_centered,
        "gate": gate,
        "norm_before_gate": norm_before_gate,
        "num_groups": num_groups,
    }
    choice = choose(x, scale, implementation=implementation, **arguments)
    if choice.implementation == "reference":
        return reference.rms_norm(x, scale, **arguments)
    options = Options(
        eps=eps,
        zero_centered=zero_centered,
        norm_before_gate=norm_before_gate,
        num_groups=num_groups,
        kernels=choice.config or Kernels(),
    )
    return _rms_norm(options, x, scale, gate)


def choose(
    x: Any,
    scale: Any,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    gate: Any = None,
    norm_before_gate: bool = True,
    num_groups: int = 1,
    implementation: Implementation | None = None,
) -> Choice:
    """Which implementation `rms_norm` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    del eps, zero_centered, norm_before_gate
    _check(x, scale, gate, num_groups)
    refused, kernels = {}, None
    if reason := _mosaic_refusal(x, scale, gate, num_groups):
        refused["mosaic"] = reason
    else:
        rows, width = math.prod(x.shape[:-1]), x.shape[-1] // num_groups
        call = {
            "rows": rows,
            "width": width,
            "dtype": x.dtype,
            "gated": gate is not None,
        }
        tilings = {}
        for direction in ("fwd", "bwd"):
            # A named "mosaic" is obeyed; otherwise each direction takes the faster.
            if implementation is None and configs.xla_is_faster(
                direction=direction, **call
            ):
                continue
            tilings[direction] = configs.pick(direction=direction, **call)
        kernels = Kernels(**tilings)
        if not tilings:
            refused["mosaic"] = "XLA was measured to be faster at this size, both ways"
    return select("rms_norm", implementation, refused, config=kernels)


def _check(x: Any, scale: Any, gate: Any, num_groups: int) -> None:
    if jnp.dtype(x.dtype).name not in FLOATS:
        raise ValueError(
            f"rms_norm: x.dtype={x.dtype}, allowed are {', '.join(FLOATS)}"
        )
    if not x.shape or scale.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: scale.shape={scale.shape} for x.shape={x.shape}, allowed is "
            "[D] for [..., D]"
        )
    if gate is not None and gate.shape != x.shape:
        raise ValueError(
            f"rms_norm: gate.shape={gate.shape}, allowed is x.shape={x.shape}"
        )
    if num_groups < 1 or x.shape[-1] % num_groups:
        raise ValueError(
            f"rms_norm: num_groups={num_groups}, allowed are divisors of "
            f"D={x.shape[-1]}"
        )


def _mosaic_refusal(x: Any, scale: Any, gate: Any, num_groups: int) -> str | None:
    """Why the kernels cannot run these inputs, `None` if they can."""
    if not (hw.is_hopper() or interpret.is_interpreting()):
        return f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
    if jnp.dtype(scale.dtype) not in (jnp.dtype(jnp.float32), jnp.dtype(x.dtype)):
        return f"scale.dtype={scale.dtype}, the kernels take float32 or {x.dtype}"
    if gate is not None and gate.dtype != x.dtype:
        return f"gate.dtype={gate.dtype}, the kernels take x.dtype={x.dtype}"
    rows, width = math.prod(x.shape[:-1]), x.shape[-1] // num_groups
    return configs.refusal(rows, width, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(options: Options, x, scale, gate):
    shape = x.shape
    x, scale, gate = _grouped(options, x, scale, gate)
    if options.kernels.fwd is None:
        y = xla.forward(x, _factor(options, scale), gate, **_formula(options))
    else:
        y = _kernel_module().rms_norm_fwd(
            _plan(options, x, gate, "fwd"), x, scale, gate
        )
    return y.reshape(shape)


def _rms_norm_fwd(options: Options, x, scale, gate):
    return _rms_norm(options, x, scale, gate), (x, scale, gate)


def _rms_norm_bwd(options: Options, residuals, dy):
    shape, scale_dtype = residuals[0].shape, residuals[1].dtype
    x, scale, gate = _grouped(options, *residuals)
    dy = dy.reshape(x.shape)
    if options.kernels.bwd is None:
        factor = _factor(options, scale)
        grads = xla.backward(x, factor, gate, dy, **_formula(options))
    else:
        plan = _plan(options, x, gate, "bwd")
        grads = _kernel_module().rms_norm_bwd(plan, x, scale, gate, dy)
    dx, dscale, dgate = grads
    return (
        dx.reshape(shape),
        dscale.reshape(-1).astype(scale_dtype),
        None if dgate is None else dgate.reshape(shape),
    )


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


def _grouped(options: Options, x, scale, gate):
    """x, gate -> [N, groups, W]; scale -> [groups, W]."""
    width = x.shape[-1] // options.num_groups
    shape = (math.prod(x.shape[:-1]), options.num_groups, width)
    gate = None if gate is None else gate.reshape(shape)
    return x.reshape(shape), scale.reshape(shape[1:]), gate


def _factor(options: Options, scale: jax.Array) -> jax.Array:
    scale = scale.astype(jnp.float32)
    return 1.0 + scale if options.zero_centered else scale


def _formula(options: Options) -> dict[str, Any]:
    return {"eps": options.eps, "norm_before_gate": options.norm_before_gate}


def _kernel_module():
    """Imported on first use: Mosaic GPU takes a second that CPU users need not pay."""
    from pallas_kernels.rms_norm import kernel

    return kernel


def _plan(options: Options, x: jax.Array, gate: jax.Array | None, direction: str):
    order = "after" if options.norm_before_gate else "before"
    return _kernel_module().Plan(
        rows=x.shape[0],
        groups=x.shape[1],
        width=x.shape[2],
        dtype=jnp.dtype(x.dtype),
        gated="no" if gate is None else order,
        zero_centered=options.zero_centered,
        eps=options.eps,
        config=getattr(options.kernels, direction),
    )

"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels._common.forward_only import forward_only
from pallas_kernels._common.pieces import PIECE_BYTES
from pallas_kernels.gemv import config as configs
from pallas_kernels.gemv import reference, xla


MAX_ROWS = configs.MAX_ROWS
MEASURED_ROWS = 1
DEEP = 3  # K over N from which XLA's products are as fast or faster in the rows


def choose(
    x: Any,
    weights: Any,
    *,
    norm_scale: Any = None,
    zero_centered: bool = False,
    eps: float = 1e-6,
    swiglu: bool = False,
    residual: Any = None,
    out_dtype: Any = None,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `gemv` would run.

    Args:
      x, weights, norm_scale, zero_centered, eps, swiglu, residual, out_dtype, config:
        as for `gemv`; arrays or `jax.ShapeDtypeStruct`.
      implementation: the one asked for.

    Returns:
      The choice, with a `Config` if it is "mosaic".

    Raises:
      ValueError: a shape or dtype is not allowed, or `config` is given and an
        implementation that has none is named.
      NotImplementedError: the named implementation cannot run this call.
    """
    del zero_centered, eps
    if config is not None and implementation in ("xla", "reference"):
        raise ValueError(
            f'config={config} is for "mosaic", implementation={implementation!r} has '
            "none"
        )
    weights = _listed(weights)
    check(x, weights, norm_scale, swiglu, residual)
    dtypes_of(x, 1 if swiglu else len(weights), out_dtype)
    sizes = {
        "rows": x.shape[0],
        "depth": x.shape[1],
        "widths": tuple(w.shape[1] for w in (weights[:1] if swiglu else weights)),
    }
    if config is not None and config.ring and swiglu and config.burst % 2:
        raise ValueError(
            f"config has burst={config.burst} with a ring, gate and up take even "
            "numbers of pieces"
        )
    refused: dict[str, str] = {}
    dtypes = [x.dtype, *(w.dtype for w in weights)]
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(**sizes, dtypes=dtypes):
        refused["mosaic"] = reason
    elif config is None:
        config = configs.pick(**sizes, gated=swiglu, sms=hw.device().sms)
    only_named = {}
    if (rows := x.shape[0]) > MEASURED_ROWS:
        only_named["mosaic"] = f"no measured row speaks for M = {rows} yet"
    elif x.shape[1] >= DEEP * (width := sum(sizes["widths"])):
        only_named["mosaic"] = f"XLA is faster where K = {x.shape[1]} and N = {width}"
    return select("gemv", implementation, refused, only_named=only_named, config=config)


def _listed(weights: Any) -> list[Any]:
    return list(weights) if isinstance(weights, (list, tuple)) else [weights]


def dtypes_of(x: Any, count: int, out_dtype: Any) -> list[Any]:
    """Of each result."""
    if not isinstance(out_dtype, (list, tuple)):
        return [jnp.dtype(x.dtype if out_dtype is None else out_dtype)] * count
    if len(out_dtype) != count:
        raise ValueError(
            f"out_dtype has {len(out_dtype)} entries, expected one for each of "
            f"{count} results"
        )
    return [jnp.dtype(d) for d in out_dtype]


def check(
    x: Any, weights: Sequence[Any], norm_scale: Any, swiglu: bool, residual: Any
) -> None:
    """Refuses shapes and dtypes that `gemv` does not allow."""
    if len(x.shape) != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{list(x.shape)}, expected float[M, K]")
    rows, depth = x.shape
    if not weights:
        raise ValueError("weights are (), expected one or more")
    for w in weights:
        if len(w.shape) != 2 or w.shape[0] != depth:
            raise ValueError(
                f"a weight is {w.dtype}{list(w.shape)}, expected float[{depth}, N]"
            )
    if norm_scale is not None and norm_scale.shape != (depth,):
        raise ValueError(
            f"norm_scale is {norm_scale.dtype}{list(norm_scale.shape)}, expected "
            f"float[{depth}]"
        )
    shapes = [tuple(w.shape) for w in weights]
    if swiglu and (len(weights) != 2 or shapes[0] != shapes[1]):
        raise ValueError(
            f"swiglu with weights {shapes}, expected those of gate and up, of one shape"
        )
    if residual is None:
        return
    if len(weights) > (2 if swiglu else 1):
        raise ValueError(
            f"residual is given with {len(weights)} weights, expected one result"
        )
    if residual.shape != (rows, shapes[0][1]):
        raise ValueError(
            f"residual is {residual.dtype}{list(residual.shape)}, expected "
            f"float[{rows}, {shapes[0][1]}]"
        )


def check_prefetch(prefetch: Sequence[Any]) -> None:
    """Refuses an array that cannot be brought into L2.

    Raises:
      ValueError: it is no multiple of 16 bytes.
    """
    for array in prefetch:
        if array.size * array.dtype.itemsize % PIECE_BYTES:
            raise ValueError(
                f"prefetch has {array.dtype}{list(array.shape)}, expected multiples of "
                f"{PIECE_BYTES} bytes"
            )


def gemv(
    x: jax.Array,
    weights: jax.Array | Sequence[jax.Array],
    *,
    norm_scale: jax.Array | None = None,
    zero_centered: bool = False,
    eps: float = 1e-6,
    swiglu: bool = False,
    residual: jax.Array | None = None,
    prefetch: jax.Array | Sequence[jax.Array] = (),
    at_rest: bool = False,
    out_dtype: DTypeLike | Sequence[DTypeLike] | None = None,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Products of few rows with matrices, with what stands around them in a layer.

    h = x, or x / sqrt(mean(x^2) + eps) * norm_scale
    y_i = h @ w_i, or silu(h @ w_0) * (h @ w_1) with `swiglu`; + residual

    Sums are float32, and nothing is rounded before the result. For decoding: the
    kernel has no gradient.

    Args:
      x: [M, K], bfloat16 or float16 for the kernel, which has M of at most `MAX_ROWS`.
      weights: [K, N] in x's dtype, or several; those with one x are one launch.
      norm_scale: [K] of an RMSNorm of x that comes first, float32 or x.dtype.
      zero_centered: multiply with 1 + norm_scale.
      eps: added to the mean square.
      swiglu: whether the weights are the gate and the up projection of one result.
      residual: [M, N], added to the one result.
      prefetch: what the next launch reads, such as its weights, an array or several of
        multiples of 16 bytes. The kernel has it brought into L2 when it has read its
        own weights, and memory does not idle between the launches. Changes no result.
        It must be an array as a whole: a slice of one is copied first. More than L2
        holds drives itself out.
      at_rest: whether the weights and `norm_scale` are arguments of the whole program,
        as they are: no slices of them, nothing that it computes. A launch that overlaps
        the one in front of it then asks for them before that one has ended. Without it
        they may be made by XLA, not by a kernel that overlaps this one.
      out_dtype: of the results, x.dtype by default; one, or one for each result.
      config: how "mosaic" divides the weights, `None` for its own choice.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      [M, N], or a tuple of them if `weights` is several and not `swiglu`.

    Raises:
      ValueError: a shape or dtype is not allowed, or `config` is given and an
        implementation that has none is named.
      NotImplementedError: the named implementation cannot run this call, or a gradient
        through "mosaic" is asked for.

    Source: Basic Linear Algebra Subprograms, level 2 (Dongarra et al. 1988); Root Mean
    Square Layer Normalization (arXiv 1910.07467); GLU Variants (arXiv 2002.05202).
    """
    options: dict[str, Any] = {
        "norm_scale": norm_scale,
        "zero_centered": zero_centered,
        "eps": eps,
        "swiglu": swiglu,
        "residual": residual,
    }
    choice = choose(
        *(x, weights),
        out_dtype=out_dtype,
        config=config,
        implementation=implementation,
        **options,
    )
    prefetch = _listed(prefetch)
    check_prefetch(prefetch)
    listed = _listed(weights)
    results = 1 if swiglu else len(listed)
    options["out_dtypes"] = dtypes_of(x, results, out_dtype)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that others need not pay.
        from pallas_kernels.gemv import kernel, kernel_ring

        options["at_rest"] = at_rest
        launch = kernel_ring.gemv
        if not choice.config.ring:
            options["prefetch"] = tuple(prefetch)
            launch = kernel.gemv
        launch = forward_only("gemv", launch)
        found = launch(choice.config, x, listed, **options)
    else:
        module = xla if choice.implementation == "xla" else reference
        found = module.gemv(x, listed, **options)
    is_several = isinstance(weights, (list, tuple)) and not swiglu
    return found if is_several else found[0]

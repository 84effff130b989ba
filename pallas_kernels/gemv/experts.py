"""`expert_gemv`: products of few tokens with the matrices of the experts they visit."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels._common.forward_only import forward_only
from pallas_kernels.gemv import config as configs


Activation = Literal["relu2", "swiglu"]


def expert_gemv(
    x: jax.Array,
    w: jax.Array,
    ids: jax.Array,
    *,
    weights: jax.Array | None = None,
    activation: Activation | None = None,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums of products of rows with the matrices of experts, for decoding.

    y_s = f(sum_j weights_sj x_r(s, j) @ w[ids_sj]),    r(s, j) = (s J + j) // repeats

    with `repeats` = S J / R: rows of x are read by neighbouring visits. A first map of
    T tokens with k experts each has S = T k and J = 1, the map that adds them up S = T
    and J = k. No sort, no table of tasks: for a handful of tokens, whose experts are
    read once for each visit. The kernel has no gradient.

    Args:
      x: [R, K], bfloat16 or float16 for the kernel.
      w: [E, K, N] of x's dtype; with "swiglu" [E, K, 2 N], gate then up.
      ids: i32[S, J]; a visit to an expert outside E reads and adds nothing.
      weights: f32[S, J], 1 by default.
      activation: f, none by default; sums are float32 before it.
      config: how "mosaic" divides the matrices, `None` for its own choice; not
        `paired`.
      implementation: "mosaic", by name only until measured, "xla", "reference"; `None`
        takes the best that can.

    Returns:
      [S, N] of x's dtype.

    Raises:
      ValueError: a shape, dtype, activation or config is not allowed.
      NotImplementedError: the named implementation cannot run this call, or a gradient
        is taken through "mosaic".

    Source: Basic Linear Algebra Subprograms, level 2 (Dongarra et al. 1988); mixtures
    of experts as in arXiv 1701.06538.
    """
    results, visits, repeats = _check(x, w, ids, weights, activation)
    if config is not None and (config.paired or implementation in ("xla", "reference")):
        raise ValueError(
            f'config={config} with implementation={implementation!r}: only "mosaic" '
            "has one, and paired=False is all it has"
        )
    gated = activation == "swiglu"
    width = w.shape[2] // (2 if gated else 1)
    choice = _choose(x, w, results, width, gated, config, implementation)
    weights = jnp.ones(ids.shape, jnp.float32) if weights is None else weights
    if choice.implementation != "mosaic":
        return _plain(x, w, ids, weights, activation, choice.implementation, repeats)
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.gemv import kernel_experts

    plan = kernel_experts.Plan(
        results=results,
        visits=visits,
        experts=w.shape[0],
        repeats=repeats,
        depth=x.shape[1],
        width=width,
        gated=gated,
        squares=activation == "relu2",
        config=choice.config,
    )
    launch = forward_only("expert_gemv", kernel_experts.expert_gemv)
    return launch(plan, x.dtype, {"x": x, "w": w, "ids": ids, "weights": weights})


def _check(x: Any, w: Any, ids: Any, weights: Any, activation: Any) -> tuple[int, ...]:
    """S, J and how many visits read a row."""
    if x.ndim != 2 or w.ndim != 3 or w.shape[1] != x.shape[1] or w.dtype != x.dtype:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)} and w {w.dtype}{list(w.shape)}, expected "
            "[R, K] and [E, K, N] of one dtype"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size or not w.size:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)} and w {list(w.shape)}, expected numbers of "
            "a floating dtype, and some"
        )
    if (
        ids.ndim != 2
        or ids.dtype != jnp.int32
        or not ids.size
        or (ids.size % x.shape[0])
    ):
        raise ValueError(
            f"ids is {ids.dtype}{list(ids.shape)}, expected int32[S, J] with S J a "
            f"multiple of the {x.shape[0]} rows of x"
        )
    if weights is not None and (
        weights.shape != ids.shape or weights.dtype != jnp.float32
    ):
        raise ValueError(
            f"weights is {weights.dtype}{list(weights.shape)}, expected "
            f"float32{list(ids.shape)}"
        )
    if activation is not None and activation not in get_args(Activation):
        raise ValueError(
            f"activation={activation!r}, allowed are {get_args(Activation)} and None"
        )
    if activation == "swiglu" and w.shape[2] % 2:
        raise ValueError(f"w has N = {w.shape[2]}, expected gate and up of equal width")
    return *ids.shape, ids.size // x.shape[0]


def _choose(
    x: Any,
    w: Any,
    results: int,
    width: int,
    gated: bool,
    config: configs.Config | None,
    implementation: Implementation | None,
) -> Choice:
    refused = {}
    sizes = {"rows": 1, "depth": x.shape[1], "widths": (width,) * results}
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(**sizes, dtypes=[x.dtype, w.dtype]):
        refused["mosaic"] = reason
    elif config is None:
        config = configs.heuristic(**sizes, gated=gated, sms=hw.device().sms)
    only_named = {"mosaic": "no measured row speaks for it yet"}
    return select(
        "expert_gemv", implementation, refused, only_named=only_named, config=config
    )


def _plain(x, w, ids, weights, activation, implementation, repeats) -> jax.Array:
    """Every visit's matrix is copied: for tests and few experts."""
    rows = jnp.repeat(x, repeats, axis=0).reshape(*ids.shape, x.shape[1])
    is_expert = (ids >= 0) & (ids < w.shape[0])
    matrices = w[jnp.where(is_expert, ids, 0)]  # [S, J, K, N]
    precision = None
    if implementation == "reference":
        rows, matrices = rows.astype(jnp.float32), matrices.astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST
    y = jnp.einsum(
        *("sjk,sjkn->sjn", rows, matrices),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    y = jnp.where(is_expert[..., None], y * weights[..., None], 0.0)
    y = jnp.sum(y, axis=1)
    if activation == "relu2":
        y = jnp.square(jnp.maximum(y, 0.0))
    if activation == "swiglu":
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return y.astype(x.dtype)

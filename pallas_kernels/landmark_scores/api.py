"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.landmark_scores import config as configs
from pallas_kernels.landmark_scores import reference, xla


_ONLY_NAMED = {"mosaic": "it is not faster at every measured size"}


def choose(
    q: Any,
    landmarks: Any,
    allowed: Any,
    *,
    scale: float | None = None,
    logit_cap: float | None = None,
    layer: Any = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `landmark_scores` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    _check(q, landmarks, allowed, logit_cap, layer)
    refused, config = {}, None
    batch, heads, width = q.shape
    groups, count = allowed.shape[1:]
    sizes = {
        "rows": batch * groups,
        "landmarks": count,
        "group": heads // groups,
        "head_dim": width,
    }
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(
        **sizes, dtypes=(q.dtype, landmarks.dtype), scale=scale
    ):
        refused["mosaic"] = reason
    else:
        config = configs.pick(**sizes)
    return select(
        "landmark_scores",
        implementation,
        refused,
        only_named=_ONLY_NAMED,
        config=config,
    )


def _check(q: Any, landmarks: Any, allowed: Any, logit_cap: Any, layer: Any) -> None:
    for name, array, axes in (
        ("q", q, "[B, H, K]"),
        ("allowed", allowed, "[B, G, C]"),
    ):
        if len(array.shape) != 3:
            raise ValueError(f"{name} has shape {list(array.shape)}, expected {axes}")
    if allowed.dtype != jnp.bool_:
        raise ValueError(f"allowed is {allowed.dtype}, expected bool")
    for name, array in (("q", q), ("landmarks", landmarks)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {array.dtype}, expected a floating dtype")
    batch, heads, width = q.shape
    groups = allowed.shape[1]
    if heads % groups:
        raise ValueError(
            f"{heads} query heads are no multiple of the {groups} kv heads"
        )
    expected = (*allowed.shape, width)
    found = landmarks.shape if layer is None else landmarks.shape[1:]
    axes = "[B, G, C, K]" if layer is None else "[L, B, G, C, K]"
    if allowed.shape[0] != batch or found != expected:
        raise ValueError(
            f"landmarks have shape {list(landmarks.shape)} for q {list(q.shape)} and "
            f"allowed {list(allowed.shape)}, expected {axes}"
        )
    if layer is not None and (layer.shape != () or layer.dtype != jnp.int32):
        raise ValueError(f"layer is {layer.dtype}{list(layer.shape)}, expected int32[]")
    if logit_cap is not None and logit_cap <= 0:
        raise ValueError(f"logit_cap={logit_cap} must be positive or None")


def landmark_scores(
    q: jax.Array,
    landmarks: jax.Array,
    allowed: jax.Array,
    *,
    scale: float | None = None,
    logit_cap: float | None = None,
    layer: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The largest weight that a query group gives to each landmark, as a logarithm.

    s_rc = scale q_r . l_c    lse_r = log sum_c exp(s_rc)    w_c = max_r s_rc - lse_r

    with sums over the landmarks that are allowed. The maximum of s - lse orders as that
    of softmax(s) does, and nothing underflows. Not differentiable: q and landmarks get
    no gradient.

    Args:
      q: [B, H, K], after the rotary embedding; query head h reads kv head h // (H / G).
      landmarks: [B, G, C, K], a chunk's mean key each; with `layer` those of all
        layers, [L, B, G, C, K], of which no copy is made by "mosaic".
      allowed: bool[B, G, C], landmarks that may be chosen; the others have no part in
        the sums, and may hold anything.
      scale: factor on the scores; `None` is K^-1/2.
      logit_cap: scores become cap * tanh(score / cap); `None` for no cap.
      layer: i32[], the layer that is meant; less than 0 is 0, and more than the last is
        the last.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can, and
        never "mosaic" so far.

    Returns:
      w f32[B, G, C], -inf where a landmark is not allowed, and lse f32[B, H], -inf
      where none is.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: ShadowKV (arXiv 2410.21465), section 4.2: there the softmax is rounded to
    16 bits, here nothing is.
    """
    choice = choose(
        q,
        landmarks,
        allowed,
        scale=scale,
        logit_cap=logit_cap,
        layer=layer,
        implementation=implementation,
    )
    q, landmarks = jax.lax.stop_gradient((q, landmarks))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choice.implementation != "mosaic":
        module = xla if choice.implementation == "xla" else reference
        if layer is not None:  # the kernel does so itself
            layer = jnp.clip(layer, 0, landmarks.shape[0] - 1)
        return module.landmark_scores(
            q, landmarks, allowed, scale=scale, logit_cap=logit_cap, layer=layer
        )
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.landmark_scores import kernel

    plan = kernel.Plan.of(
        q, allowed, scale=scale, logit_cap=logit_cap, config=choice.config
    )
    return kernel.landmark_scores(plan, q, landmarks, allowed, layer)

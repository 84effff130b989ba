"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels._common.forward_only import forward_only
from pallas_kernels.rope_append import config as configs
from pallas_kernels.rope_append import reference, xla


_ONLY_NAMED = {"mosaic": "no measured row speaks for it yet"}


def choose(
    q: Any,
    k: Any,
    v: Any,
    slots: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cos_sin: Any = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `rope_append` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.

    Raises:
      NotImplementedError: the named implementation cannot run this call.
    """
    del k, v, slots, v_cache, options
    reason = configs.refusal(
        head_dim=q.shape[-1],
        half=0 if cos_sin is None else cos_sin.shape[-1] // 2,
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
    )
    if not (hw.is_hopper() or interpret.is_interpreting()):
        reason = f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
    refused = {} if reason is None else {"mosaic": reason}
    return select("rope_append", implementation, refused, only_named=_ONLY_NAMED)


def rope_append(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    positions: jax.Array | None = None,
    position_cache: jax.Array | None = None,
    cos_sin: jax.Array | None = None,
    layer: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    zero_centered: bool = False,
    eps: float = 1e-6,
    padded_group: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """What projections of new tokens go through between their product and attention.

    q <- rotate(q / rms(q) * scale),  k likewise,  and k and v into the cache

    Norm and rotation are f32, each rounded to q's dtype. Donate the caches: "mosaic"
    then writes them where they are.

    Args:
      q: [B, T, H, K], any float dtype.
      k: [B, T, G, K], G a divisor of H.
      v: like k.
      slots: i32[B, T], where in its row of the cache a token goes; one that is none,
        such as -1 or S, drops the token. No two tokens of a row may name one slot: what
        stands there then is undefined.
      k_cache: [B, S, G, K], any float dtype.
      v_cache: like k_cache.
      positions: i32[B, T], written to `position_cache`.
      position_cache: i32[B, S], with `positions`.
      cos_sin: f32[B, T, R], cosines, then sines of the R/2 angles by which the first R
        dimensions of each head turn, dimension i with i + R/2; `None` for no rotation.
        A table and no base: a token's is the same in all layers, and any scaling of it
        is the caller's.
      layer: i32[], if the caches have a leading axis of layers, the one that is meant.
        Less than 0 is 0, and more than the last is the last.
      q_scale, k_scale: [K], of the norms of q and k; `None` for no norm.
      zero_centered: whether the norms multiply by 1 + scale.
      eps: added to the mean squares.
      padded_group: heads of q in the result for each kv head, zeros behind the H / G
        that there are; see `decode_attention`, `heads`. `None` adds none.
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has K of 64, 128
        or 256; `None` does not take it yet.

    Returns:
      q [B, T, G * padded_group, K], and the caches of keys, values and positions, the
      last `None` if none was given.

    Raises:
      ValueError: a shape, dtype or option is not allowed.
      NotImplementedError: the named implementation cannot run this call, or a gradient
        through "mosaic" is asked for.

    Source: RoFormer (arXiv 2104.09864), section 3.2, for the rotation; RMSNorm (arXiv
    1910.07467) over heads as in Qwen3 (arXiv 2505.09388).
    """
    _check_tokens(q, k, v, slots, padded_group)
    _check_caches(q, k, k_cache, v_cache, positions, position_cache, layer)
    _check_parameters(q, cos_sin, q_scale, k_scale)
    if layer is not None:
        layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, k_cache.shape[0] - 1)
    choice = choose(
        *(q, k, v, slots, k_cache, v_cache),
        cos_sin=cos_sin,
        implementation=implementation,
    )
    caches = (k_cache, v_cache)
    if position_cache is not None:
        caches = (*caches, position_cache)
    options: dict[str, Any] = {
        "positions": positions,
        "cos_sin": cos_sin,
        "layer": layer,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "zero_centered": zero_centered,
        "eps": eps,
        "padded_group": padded_group,
    }
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.rope_append import kernel

        # A derivative cannot be refused around what writes in place, so it is in front.
        refusing = forward_only("rope_append", lambda *x: x)
        given = {x: options[x] for x in ("q_scale", "k_scale", "cos_sin")}
        q, k, v, caches, given = refusing(q, k, v, caches, given)
        options |= given
        run = kernel.rope_append
    elif choice.implementation == "reference":
        run = reference.rope_append
    else:
        run = xla.rope_append
    q, (k_cache, v_cache, *rest) = run(q, k, v, slots, caches, **options)
    return q, k_cache, v_cache, rest[0] if rest else None


def _expect(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name} has dtype {array.dtype}, expected {jnp.dtype(dtype)}")


def _check_tokens(q: Any, k: Any, v: Any, slots: Any, padded_group: int | None) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"q and k have shapes {q.shape} and {k.shape}, expected four axes"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q has dtype {q.dtype}, expected a floating one")
    batch, time, heads, dim = q.shape
    kv_heads = k.shape[2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads, which is no multiple of the {kv_heads} heads of k"
        )
    for name, array in (("k", k), ("v", v)):
        _expect(name, array, (batch, time, kv_heads, dim), q.dtype)
    _expect("slots", slots, (batch, time), jnp.int32)
    if padded_group is not None and padded_group < heads // kv_heads:
        raise ValueError(
            f"padded_group is {padded_group}, expected at least H / G = "
            f"{heads // kv_heads}"
        )


def _check_caches(
    q: Any,
    k: Any,
    k_cache: Any,
    v_cache: Any,
    positions: Any,
    position_cache: Any,
    layer: Any,
) -> None:
    lead = () if layer is None else k_cache.shape[:1]
    rank = 4 + len(lead)
    if k_cache.ndim != rank:
        raise ValueError(f"k_cache has shape {k_cache.shape}, expected {rank} axes")
    if not jnp.issubdtype(k_cache.dtype, jnp.floating):
        raise ValueError(f"k_cache has dtype {k_cache.dtype}, expected a floating one")
    length = k_cache.shape[-3]
    shape = (*lead, k.shape[0], length, *k.shape[2:])
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache)):
        _expect(name, array, shape, k_cache.dtype)
    if (positions is None) != (position_cache is None):
        raise ValueError(
            "positions and position_cache come together, got "
            f"{'none' if positions is None else 'one'} and "
            f"{'none' if position_cache is None else 'one'}"
        )
    if positions is not None:
        _expect("positions", positions, q.shape[:2], jnp.int32)
        _expect("position_cache", position_cache, shape[:-2], jnp.int32)
    if layer is not None and (
        jnp.shape(layer) != ()
        or not jnp.issubdtype(jnp.result_type(layer), jnp.integer)
    ):
        raise ValueError(f"layer is {layer}, expected one integer")


def _check_parameters(q: Any, cos_sin: Any, q_scale: Any, k_scale: Any) -> None:
    dim = q.shape[-1]
    if cos_sin is not None:
        rotary = cos_sin.shape[-1] if cos_sin.ndim else 0
        if not 2 <= rotary <= dim or rotary % 2:
            raise ValueError(
                f"cos_sin has shape {cos_sin.shape}, expected an even number up to K = "
                f"{dim} at its end"
            )
        _expect("cos_sin", cos_sin, (*q.shape[:2], rotary), jnp.float32)
    for name, array in (("q_scale", q_scale), ("k_scale", k_scale)):
        if array is not None:
            _expect(name, array, (dim,), array.dtype)

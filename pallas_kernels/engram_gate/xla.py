"""The gate as XLA runs it well: nothing is kept for the backward pass but the inputs.

Differentiating the reference would keep float32 copies of streams, keys and products.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def _scores(h: jax.Array, keys: jax.Array, gain: jax.Array, eps: float) -> Any:
    """score, 1 / rms of the stream and of the key, f32[B, T, G] each."""
    width = h.shape[-1]
    rh = jax.lax.rsqrt(jnp.mean(h * h, axis=-1) + eps)
    rk = jax.lax.rsqrt(jnp.mean(keys * keys, axis=-1) + eps)
    score = jnp.sum(h * keys * gain[None, None], axis=-1) * rh * rk * width**-0.5
    return score, rh, rk


def _gate(score: jax.Array, clamp: float, copies_sign: bool) -> Any:
    """The gate and the root in it, f32[B, T, G] each."""
    root = jnp.sqrt(jnp.maximum(jnp.abs(score), clamp))
    if copies_sign:
        return jax.nn.sigmoid(jnp.copysign(root, score)), root
    return jax.nn.sigmoid(jnp.sign(score) * root), root


def forward(
    h: jax.Array,
    kv: jax.Array,
    gain: jax.Array,
    is_live: jax.Array | None,
    *,
    eps: float,
    clamp: float,
    copies_sign: bool,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(y [B, T, G, D], gate f32[B, T, G]).

    Args:
      h: [B, T, G, D].
      kv: [B, T, G + 1, D].
      gain: f32[G, D], product of the two norms' gains.
      is_live: bool[B, T] or `None`.
    """
    h, kv = h.astype(jnp.float32), kv.astype(jnp.float32)
    score, _, _ = _scores(h, kv[:, :, :-1], gain, eps)
    gate, _ = _gate(score, clamp, copies_sign)
    y = gate[..., None] * kv[:, :, -1:]
    if is_live is not None:
        gate = jnp.where(is_live[:, :, None], gate, 0.0)
        y = jnp.where(is_live[:, :, None, None], y, 0.0)
    return y.astype(dtype), gate


def backward(
    h: jax.Array,
    kv: jax.Array,
    gain: jax.Array,
    is_live: jax.Array | None,
    dy: jax.Array,
    dgate: jax.Array,
    *,
    eps: float,
    clamp: float,
    copies_sign: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dh like h, dkv like kv, dgain f32[G, D]; arguments as of `forward`.

    Args:
      dy: [B, T, G, D].
      dgate: f32[B, T, G].
    """
    width, dtypes = h.shape[-1], (h.dtype, kv.dtype)
    h, kv, dy = (x.astype(jnp.float32) for x in (h, kv, dy))
    if is_live is not None:
        # Zeros have zero gradients, whatever a dead token holds.
        live = is_live[:, :, None, None]
        h, kv, dy = (jnp.where(live, x, 0.0) for x in (h, kv, dy))
        dgate = jnp.where(live[..., 0], dgate, 0.0)
    keys, value = kv[:, :, :-1], kv[:, :, -1:]
    score, rh, rk = _scores(h, keys, gain, eps)
    gate, root = _gate(score, clamp, copies_sign)
    dscore = (jnp.sum(dy * value, axis=-1) + dgate) * gate * (1.0 - gate)
    dscore = jnp.where(jnp.abs(score) > clamp, dscore * 0.5 / root, 0.0)
    cross = (dscore * rh * rk * width**-0.5)[..., None]  # [B, T, G, 1]
    own_h = (dscore * score * rh * rh / width)[..., None]
    own_k = (dscore * score * rk * rk / width)[..., None]
    dh = cross * keys * gain[None, None] - own_h * h
    dkeys = cross * h * gain[None, None] - own_k * keys
    dvalue = jnp.sum(gate[..., None] * dy, axis=2, keepdims=True)
    dgain = jnp.sum(cross * h * keys, axis=(0, 1))
    dkv = jnp.concatenate([dkeys, dvalue], axis=2)
    return dh.astype(dtypes[0]), dkv.astype(dtypes[1]), dgain

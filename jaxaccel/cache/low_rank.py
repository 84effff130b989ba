"""Keys of low rank: a basis for each row's prompt, and keys in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


_HIGHEST = jax.lax.Precision.HIGHEST
# Of the largest eigenvalue, in f32.
_NOISE = 1e-6


def gram(keys: jax.Array, is_real: jax.Array) -> jax.Array:
    """Products of the keys' columns, summed over the tokens of each row.

    Args:
      keys: [B, T, W], all kv heads of a token side by side.
      is_real: bool[B, T].

    Returns:
      f32[B, W, W]. Keys of 16 bits enter as they are: their products are exact in f32.
    """
    keys = jnp.where(is_real[..., None], keys, jnp.zeros((), keys.dtype))
    return jnp.einsum(
        "btv,btw->bvw",
        keys,
        keys,
        precision=_HIGHEST,
        preferred_element_type=jnp.float32,
    )


def basis_reference(
    gram: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`basis`, by all eigenvectors of the products."""
    values, vectors = jnp.linalg.eigh(gram)
    return _leading(values, vectors, gram, rank)


def basis(
    gram: jax.Array,
    rank: int,
    *,
    oversampling: int = 16,
    iterations: int = 3,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The directions that hold most of the keys' energy, by subspace iteration.

    Householder's QR and not Cholesky's: a prompt may have fewer tokens than the rank,
    and the products of its keys then have no inverse.

    Args:
      gram: f32[B, W, W].
      rank: directions r, at most W.
      oversampling: further directions that the iteration carries along.
      iterations: multiplications beyond the first.
      seed: of the random start, the same for all rows.

    Returns:
      f32[B, W, r], orthonormal, the largest first; i32[B], how many there are, the
      others being 0; and f32[B], the share of the sum of squares that lies in them, 1
      for a row of zeros.

    Source: Halko, Martinsson and Tropp (arXiv 0909.4061), algorithm 4.4, on the
    products. ShadowKV (arXiv 2410.21465), section 4.1, for what it is used for.
    """
    width = gram.shape[-1]
    size = min(rank + oversampling, width)
    start = jax.random.normal(jax.random.key(seed), (width, size), jnp.float32)

    def times(x):
        return jnp.matmul(gram, x, precision=_HIGHEST)

    q = jnp.broadcast_to(start, (*gram.shape[:-1], size))
    for _ in range(iterations + 1):
        q, _ = jnp.linalg.qr(times(q))
    small = jnp.einsum("bvi,bvj->bij", q, times(q), precision=_HIGHEST)
    small = (small + jnp.swapaxes(small, 1, 2)) / 2
    values, vectors = jnp.linalg.eigh(small)
    vectors = jnp.matmul(q, vectors, precision=_HIGHEST)
    return _leading(values, vectors, gram, rank)


def _leading(
    values: jax.Array, vectors: jax.Array, gram: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of eigenvalues in ascending order, what `basis` returns."""
    values = values[:, ::-1][:, :rank]
    # What is smaller is noise: the products square the condition of the keys.
    is_there = values > _NOISE * values[:, :1]  # [B, r]
    top = jnp.where(is_there[:, None, :], vectors[:, :, ::-1][:, :, :rank], 0.0)
    total = jnp.trace(gram, axis1=1, axis2=2)
    share = jnp.sum(jnp.where(is_there, values, 0.0), axis=1)
    share = jnp.clip(share / jnp.where(total > 0, total, 1.0), 0.0, 1.0)
    count = jnp.sum(is_there, axis=1, dtype=jnp.int32)
    return top, count, jnp.where(total > 0, share, 1.0)


def project(keys: jax.Array, basis: jax.Array) -> jax.Array:
    """Writes keys in a basis.

    Args:
      keys: [B, T, W].
      basis: [B, W, r], as it is stored; keys are taken in its dtype.

    Returns:
      f32[B, T, r].
    """
    return jnp.einsum(
        "btw,bwr->btr",
        keys.astype(basis.dtype),
        basis,
        precision=_HIGHEST,
        preferred_element_type=jnp.float32,
    )


def missing(
    keys: jax.Array, a: jax.Array, basis: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What keys lack in a basis.

    Args:
      keys: [B, T, W].
      a: f32[B, T, r], see `project`.
      basis: [B, W, r].

    Returns:
      f32[B, T, W], k - a basis^T, and f32[B, T], its length as a share of the key's; 0
      for a key of zeros.
    """
    keys, basis = keys.astype(jnp.float32), basis.astype(jnp.float32)
    lack = keys - jnp.einsum("btr,bwr->btw", a, basis, precision=_HIGHEST)
    norm = jnp.linalg.norm(keys, axis=-1)
    share = jnp.linalg.norm(lack, axis=-1) / jnp.where(norm > 0, norm, 1.0)
    return lack, share

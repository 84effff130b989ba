"""What the tests of mixers and of whole decoders share: rows, padding, comparison."""

import jax
import jax.numpy as jnp
import numpy as np


T = 130  # One length for all calls: each further one would compile anew.


def only(lengths, left=False):
    """i32[B, T] segments with that many real tokens, padded right (or left)."""
    index = np.arange(T)[None]
    lengths = np.asarray(lengths)[:, None]
    real = index >= T - lengths if left else index < lengths
    return jnp.asarray(real, jnp.int32)


def shift(x, amounts):
    """Moves each row left by its amount; what falls in behind is noise."""
    # By NumPy: JAX would compile each amount.
    rows = zip(np.asarray(x), amounts, strict=True)
    return jnp.asarray(np.stack([np.roll(row, -n, axis=0) for row, n in rows]))


def same(got, want, atol=2e-5):
    """Asserts that two trees of arrays agree."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)

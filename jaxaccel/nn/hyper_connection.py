"""Manifold-constrained hyper-connections: several residual streams around a layer.

`HyperConnection` and `expand_streams` stand alone for now: a decoder has one residual
stream, and nothing in the library calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


def sinkhorn(x: jax.Array, *, rounds: int = 20, eps: float = 1e-6) -> jax.Array:
    """Makes a positive matrix doubly stochastic, in f32.

    Args:
      x: [..., n, n], not negative.
      rounds: normalisations of rows and then columns.
      eps: added to sums.

    Returns:
      f32[..., n, n]; columns sum to 1, rows nearly.

    Source: Sinkhorn and Knopp (1967).
    """
    x = x.astype(jnp.float32)

    def turn(x, _):
        x = x / (jnp.sum(x, axis=-1, keepdims=True) + eps)
        return x / (jnp.sum(x, axis=-2, keepdims=True) + eps), None

    return jax.lax.scan(turn, x, length=rounds)[0]


class HyperConnection(nnx.Module):
    """Reads a layer's input from n streams, and writes its output back to them.

    u = rms(vec X);  read = sigmoid(a u W + b) + eps;  write = 2 sigmoid(a u W + b)
    mix = sinkhorn(softmax(a u W + b));  X' = mix^T X + write (x) f(sum_i read_i X_i)

    At first all streams are read alike, the output is added to each once and none is
    mixed with another: with equal streams the layer is an ordinary residual one, up to
    what the softmax leaves beside the diagonal.

    Attributes:
      kernel: f32[n D, n + n + n n]: read, write, mix.
      bias: f32[n + n + n n].
      gain: f32[3], a of each.
      scale: f32[n D], gain of the norm.

    Source: mHC (arXiv 2512.24880).
    """

    def __init__(
        self,
        d_model: int,
        streams: int,
        *,
        rounds: int = 20,
        eps: float = 1e-6,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters.

        Args:
          d_model: width D of a stream.
          streams: n.
          rounds: of `sinkhorn`.
          eps: of the norm, the sums and the reading.
          rngs: source of the `params` key.

        Raises:
          ValueError: a size is not positive.
        """
        if min(d_model, streams, rounds) < 1:
            raise ValueError(
                f"HyperConnection: d_model={d_model}, streams={streams} and "
                f"rounds={rounds} must be positive"
            )
        width, outputs = streams * d_model, streams * (2 + streams)
        draw = jax.nn.initializers.normal(width**-0.5)
        self.kernel = nnx.Param(draw(rngs.params(), (width, outputs), jnp.float32))
        # sigmoid of the first is 1 / n; the softmax nearly the identity.
        read = -math.log(streams - 1) if streams > 1 else 8.0
        self.bias = nnx.Param(
            jnp.concatenate(
                [
                    jnp.full(streams, read),
                    jnp.zeros(streams),
                    8.0 * jnp.eye(streams).reshape(-1),
                ]
            ).astype(jnp.float32)
        )
        self.gain = nnx.Param(jnp.full(3, 0.01, jnp.float32))
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.streams, self.rounds, self.eps = streams, rounds, eps

    def weights(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """How the streams are read, written and mixed, token by token.

        Args:
          x: [B, T, n, D].

        Returns:
          (read f32[B, T, n], write f32[B, T, n], mix f32[B, T, n, n], doubly
          stochastic: stream i goes to stream j with mix[i, j]).
        """
        n = self.streams
        flat = x.reshape(*x.shape[:2], -1).astype(jnp.float32)  # [B, T, n D]
        rms = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + self.eps)
        u = flat * rms * self.scale[...][None, None]
        a = self.gain[...]
        gain = jnp.concatenate(
            [jnp.full(size, a[i]) for i, size in enumerate((n, n, n * n))]
        )
        s = jnp.einsum("btd,dn->btn", u, self.kernel[...] * gain[None])
        s = s + self.bias[...][None, None]
        read = jax.nn.sigmoid(s[..., :n]) + self.eps
        write = 2.0 * jax.nn.sigmoid(s[..., n : 2 * n])
        logits = s[..., 2 * n :].reshape(*s.shape[:2], n, n)
        mix = sinkhorn(jax.nn.softmax(logits), rounds=self.rounds, eps=self.eps)
        return read, write, mix

    def __call__(
        self, x: jax.Array, layer: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Runs a layer.

        Args:
          x: [B, T, n, D].
          layer: [B, T, D] -> [B, T, D].

        Returns:
          [B, T, n, D] in x's dtype; sums over streams are f32.

        Raises:
          ValueError: x has another number of streams.
        """
        if x.ndim != 4 or x.shape[2] != self.streams:
            raise ValueError(
                f"x has shape {list(x.shape)}, expected [B, T, {self.streams}, D]"
            )
        with jax.named_scope("hyper_connection"):
            read, write, mix = self.weights(x)
            streams = x.astype(jnp.float32)
            mixed = jnp.einsum("btij,btid->btjd", mix, streams)
            h = jnp.einsum("bti,btid->btd", read, streams).astype(x.dtype)
        y = layer(h).astype(jnp.float32)
        return (mixed + write[..., None] * y[:, :, None]).astype(x.dtype)


def expand_streams(x: jax.Array, streams: int) -> jax.Array:
    """[B, T, D] -> [B, T, n, D], all streams alike."""
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[-1]))


def merge_streams(x: jax.Array) -> jax.Array:
    """[B, T, n, D] -> [B, T, D], their mean in f32, in x's dtype."""
    return jnp.mean(x.astype(jnp.float32), axis=2).astype(x.dtype)

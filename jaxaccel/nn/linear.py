"""Linear maps and the embedding table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike


def fan_in_init(gain: float = 1.0, *, expert_axis: bool = False) -> Initializer:
    """Truncated normal with standard deviation `gain / sqrt(d_in)`.

    At d_in = 2048 this is the customary 0.02, and unlike a constant it also suits a
    model a hundred times narrower.

    Args:
      gain: multiplies the standard deviation.
      expert_axis: whether the leading axis counts independent kernels.

    Returns:
      An initializer for kernels [..., d_in, d_out].
    """
    return jax.nn.initializers.variance_scaling(
        gain * gain,
        "fan_in",
        "truncated_normal",
        in_axis=-2,
        out_axis=-1,
        batch_axis=(0,) if expert_axis else (),
    )


class Linear(nnx.Module):
    """`x @ kernel + bias` over the last axis.

    Attributes:
      kernel: param_dtype[d_in, d_out].
      bias: param_dtype[d_out], only with `use_bias`.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters.

        Args:
          d_in: size of the input's last axis.
          d_out: size of the output's last axis.
          use_bias: adds a bias, zero at first.
          kernel_init: initializer of the kernel; `fan_in_init()` by default.
          dtype: dtype of the computation and of the output.
          param_dtype: dtype of the parameters.
          rngs: source of the `params` key.

        Raises:
          ValueError: a size is not positive.
        """
        if d_in < 1 or d_out < 1:
            raise ValueError(f"Linear: sizes must be positive, got {d_in} -> {d_out}")
        kernel_init = fan_in_init() if kernel_init is None else kernel_init
        self.kernel = nnx.Param(kernel_init(rngs.params(), (d_in, d_out), param_dtype))
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((d_out,), param_dtype))
        self.use_bias = use_bias
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array, *, out_dtype: DTypeLike | None = None):
        """Applies the map.

        Args:
          x: [..., d_in], any float dtype.
          out_dtype: dtype of the result, `dtype` by default. The product is summed in
            f32 anyway, so f32 here loses nothing to a cast in between.

        Returns:
          [..., d_out].
        """
        out_dtype = self.dtype if out_dtype is None else jnp.dtype(out_dtype)
        y = jnp.einsum(
            "...d,df->...f",
            x.astype(self.dtype),
            self.kernel[...].astype(self.dtype),
            preferred_element_type=out_dtype,
        )
        if self.use_bias:
            bias = self.bias[...].astype(out_dtype)
            y = y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)
        return y


class Embed(nnx.Module):
    """A table of vectors by token id, usable as the output layer too.

    Attributes:
      embedding: param_dtype[vocab, D].
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Creates the table, truncated normal with deviation `1 / sqrt(d_model)`.

        Args:
          vocab_size: number of tokens.
          d_model: width D.
          dtype: dtype of the vectors handed out and of `attend`'s operands.
          param_dtype: dtype of the table.
          rngs: source of the `params` key.
        """
        init = jax.nn.initializers.truncated_normal(d_model**-0.5)
        self.embedding = nnx.Param(
            init(rngs.params(), (vocab_size, d_model), param_dtype)
        )
        self.dtype = jnp.dtype(dtype)

    def __call__(self, tokens: Any) -> jax.Array:
        """Looks tokens up.

        An id outside the table gives NaN when traced or on a device, so that a run
        stops on it instead of learning from another token's vector.

        Args:
          tokens: i32[...].

        Returns:
          dtype[..., D].

        Raises:
          ValueError: `tokens` is a numpy array with an id outside the table.
        """
        vocab_size = self.embedding.shape[0]
        if isinstance(tokens, np.ndarray) and tokens.size:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocab_size:
                bad = low if low < 0 else high
                raise ValueError(
                    f"token id {bad} is outside the vocabulary, allowed are 0 to "
                    f"{vocab_size - 1}"
                )
        tokens = jnp.asarray(tokens)
        # `fill` counts a negative id from the end, as numpy does; past the end is NaN.
        tokens = jnp.where(tokens < 0, vocab_size, tokens)
        rows = jnp.take(self.embedding[...], tokens, axis=0, mode="fill")
        return rows.astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Scores x against every token's vector.

        Args:
          x: [..., D].

        Returns:
          f32[..., vocab].
        """
        return jnp.einsum(
            "...d,vd->...v",
            x.astype(self.dtype),
            self.embedding[...].astype(self.dtype),
            preferred_element_type=jnp.float32,
        )

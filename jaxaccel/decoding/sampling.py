"""Drawing the next token from a row of logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn.

    The filters apply in the order of the fields: logits are divided by the
    temperature, `top_k` keeps the k largest, `top_p` keeps the smallest set of what
    is left (renormalised) that holds at least that mass, and `min_p` drops what is
    less likely than that share of the likeliest token. Among equal logits the lower
    token id comes first, so that a set's size never depends on ties. At least one
    token is always kept.

    Attributes:
      temperature: 0 takes the likeliest token, whatever the filters say.
      top_k: at least 1; more than the vocabulary keeps everything.
      top_p: in (0, 1] (nucleus sampling, https://arxiv.org/abs/1904.09751).
      min_p: in [0, 1] (https://arxiv.org/abs/2407.01082).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature={self.temperature} is not a finite number >= 0"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} is less than 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} is outside [0, 1]")


def filter_logits(
    logits: jax.Array, config: SamplingConfig
) -> tuple[jax.Array, jax.Array | None]:
    """Divides by the temperature and removes what the filters exclude.

    Args:
      logits: f32[B, V].
      config: the filters; `temperature` must not be 0.

    Returns:
      f32[B, M] logits less the row's largest, -inf where excluded, and i32[B, M] the
      token of each column, or `None` where column and token are the same (M == V).
    """
    vocab = logits.shape[-1]
    # Below the largest, a quotient that overflows becomes -inf, which a softmax takes;
    # and what float32 cannot hold would be a temperature of 0 or infinity.
    largest = jnp.max(logits, axis=-1, keepdims=True)  # [B, 1]
    tiny = float(np.finfo(np.float32).tiny)
    temperature = min(max(config.temperature, tiny), 1.0 / tiny)
    logits = (logits - largest) / temperature
    tokens = None
    top_p = 1.0 if config.top_p is None else config.top_p
    if config.top_k is not None or top_p < 1.0:
        # Sorted: the filters below then work on k columns and never on V.
        kept = vocab if config.top_k is None else min(config.top_k, vocab)
        logits, tokens = jax.lax.top_k(logits, kept)  # [B, M]
    if top_p < 1.0:
        probs = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        # A token stays while those ahead of it do not reach the mass yet.
        keep = (before < top_p).at[:, 0].set(True)
        logits = jnp.where(keep, logits, -jnp.inf)
    if config.min_p is not None and config.min_p > 0.0:
        best = jnp.max(logits, axis=-1, keepdims=True)
        floor = best + jnp.log(jnp.float32(config.min_p))
        logits = jnp.where(logits >= floor, logits, -jnp.inf)
    return logits, tokens


def probabilities(logits: jax.Array, config: SamplingConfig) -> jax.Array:
    """The distribution that `sample` draws from.

    Args:
      logits: f32[B, V].
      config: the temperature, which must not be 0, and the filters.

    Returns:
      f32[B, V], 0 where the filters exclude a token.
    """
    kept, tokens = filter_logits(logits, config)
    probs = jax.nn.softmax(kept, axis=-1)
    if tokens is None:
        return probs
    row = jnp.broadcast_to(jnp.arange(logits.shape[0])[:, None], tokens.shape)
    return jnp.zeros_like(logits).at[row, tokens].set(probs)


def sample(logits: jax.Array, key: jax.Array, config: SamplingConfig) -> jax.Array:
    """Draws one token a row.

    Args:
      logits: f32[B, V].
      key: one random key, or [B] keys, one a row: a row then draws the same token
        whatever the other rows are.
      config: the temperature and the filters.

    Returns:
      i32[B].
    """
    if config.temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits, tokens = filter_logits(logits, config)
    if key.ndim == 0:
        key = jax.random.split(key, logits.shape[0])
    choice = jax.vmap(jax.random.categorical)(key, logits)  # [B]
    if tokens is not None:
        choice = jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0]
    return choice.astype(jnp.int32)

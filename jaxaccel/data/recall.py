"""Associative recall: which value stood behind this key, asked after all pairs.

Multi-query associative recall (Arora et al. 2023, Zoology, arXiv:2312.04927, section
3.2) separates mixers by the size of what they can remember: a model with a state of
fixed size fails once there are more pairs than its state can hold, attention does not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxaccel.data.batch import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """Sizes of the task.

    Attributes:
      num_pairs: pairs of a key and a value that a row begins with; no key twice.
      num_queries: keys that are asked for after them, drawn without replacement.
      num_keys: keys there are; tokens 0 .. num_keys - 1.
      num_values: values there are; the tokens behind the keys.
    """

    num_pairs: int = 32
    num_queries: int = 16
    num_keys: int = 128
    num_values: int = 128

    def __post_init__(self):
        for name in ("num_pairs", "num_queries", "num_keys", "num_values"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"RecallConfig: {name}={getattr(self, name)} must be positive"
                )
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"RecallConfig: num_pairs={self.num_pairs} needs as many keys, "
                f"num_keys={self.num_keys}"
            )
        if self.num_queries > self.num_pairs:
            raise ValueError(
                f"RecallConfig: num_queries={self.num_queries} must be at most "
                f"num_pairs={self.num_pairs}"
            )

    @property
    def vocab_size(self) -> int:
        """Tokens there are."""
        return self.num_keys + self.num_values

    @property
    def seq_len(self) -> int:
        """T: the pairs, then each query with its answer."""
        return 2 * (self.num_pairs + self.num_queries)


def recall_batch(config: RecallConfig, key: jax.Array, batch_size: int) -> PackedBatch:
    """Draws rows of the task, `key value key value ... query answer query answer`.

    Args:
      config: sizes.
      key: random key; equal keys give equal rows.
      batch_size: rows B.

    Returns:
      One document a row, of `config.seq_len` tokens. `loss_mask` is 1 at the queries
      alone: what is asked for is the token behind each.
    """

    def row(key):
        key_keys, key_values, key_queries = jax.random.split(key, 3)
        keys = jax.random.permutation(key_keys, config.num_keys)[: config.num_pairs]
        values = config.num_keys + jax.random.randint(
            key_values, (config.num_pairs,), 0, config.num_values
        )
        asked = jax.random.permutation(key_queries, config.num_pairs)
        asked = asked[: config.num_queries]
        pairs = jnp.stack([keys, values], axis=1).astype(jnp.int32)  # [pairs, 2]
        return jnp.concatenate([pairs, pairs[asked]]).reshape(-1)  # [T]

    tokens = jax.vmap(row)(jax.random.split(key, batch_size))  # [B, T]
    shape, time = tokens.shape, jnp.arange(config.seq_len, dtype=jnp.int32)
    is_query = (time >= 2 * config.num_pairs) & (time % 2 == 0)
    return PackedBatch(
        tokens=tokens,
        targets=jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))),
        segment_ids=jnp.ones(shape, jnp.int32),
        positions=jnp.broadcast_to(time, shape),
        loss_mask=jnp.broadcast_to(is_query.astype(jnp.float32), shape),
        num_bytes=jnp.broadcast_to(is_query.astype(jnp.float32), shape),
    )


def recall_accuracy(logits: jax.Array, batch: PackedBatch) -> jax.Array:
    """Share of the queries whose likeliest answer is right.

    Args:
      logits: [B, T, vocab].
      batch: what they were computed from.

    Returns:
      f32[].
    """
    right = jnp.argmax(logits, axis=-1) == batch.targets  # [B, T]
    asked = batch.loss_mask
    return jnp.sum(jnp.where(right, asked, 0.0)) / jnp.sum(asked)

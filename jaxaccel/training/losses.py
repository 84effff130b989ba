"""Cross-entropy in chunks, so that the logits of a whole batch never exist."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums over tokens, so that a mean over any split of a batch comes out the same.

    Attributes:
      loss: f32[], weighted nats plus the z-loss; the gradient is that of this.
      nats: f32[], weighted -log p(target).
      weight: f32[], sum of the weights.
      correct: f32[], weight of the tokens whose target has the largest logit.
    """

    loss: jax.Array
    nats: jax.Array
    weight: jax.Array
    correct: jax.Array


Unembed = Callable[..., jax.Array]


def _chunk_terms(logits, targets, weights, z_loss):
    """Sums of one chunk, and the gradient of its loss in the logits."""
    logits = logits.astype(jnp.float32)  # [B, C, vocab]
    top = jnp.max(logits, axis=-1)  # [B, C]
    log_z = top + jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))
    # Padded tokens may hold anything; where, not a product, keeps their NaN out.
    counted = weights > 0
    # A target outside of the vocabulary has no probability: NaN stops the run, where a
    # logit of 0 would teach it nonsense. On `weights`, so that the gradient has it too.
    vocab = logits.shape[-1]
    in_vocab = (targets >= 0) & (targets < vocab)  # [B, C]
    scale = jnp.where(in_vocab | ~counted, weights, jnp.nan)  # [B, C]
    hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    target_logit = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)  # [B, C]
    nats = jnp.where(counted, scale * (log_z - target_logit), 0.0)
    loss = nats + jnp.where(counted, weights * z_loss * jnp.square(log_z), 0.0)
    sums = LossSums(
        loss=jnp.sum(loss),
        nats=jnp.sum(nats),
        weight=jnp.sum(weights),
        correct=jnp.sum(jnp.where(in_vocab & (target_logit >= top), weights, 0.0)),
    )

    def gradient() -> jax.Array:
        probability = jnp.exp(logits - log_z[..., None])
        pull_down = (1.0 + 2.0 * z_loss * log_z)[..., None] * probability
        d_logits = scale[..., None] * (pull_down - hit.astype(jnp.float32))
        return jnp.where(counted[..., None], d_logits, 0.0)

    return sums, gradient


def _to_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [T / C, B, C, ...]; rows stay whole, so a mesh may cut them."""
    batch, time = x.shape[:2]
    x = x.reshape(batch, time // chunk, chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(unembed, z_loss, hidden, constants, targets, weights):
    def body(total, chunk):
        x, target, weight = chunk
        sums, _ = _chunk_terms(unembed(x, *constants), target, weight, z_loss)
        return jax.tree.map(jnp.add, total, sums), None

    return jax.lax.scan(body, _zero_sums(), (hidden, targets, weights))[0]


def _zero_sums() -> LossSums:
    zero = jnp.zeros((), jnp.float32)
    return LossSums(loss=zero, nats=zero, weight=zero, correct=zero)


def _chunked_fwd(unembed, z_loss, hidden, constants, targets, weights):
    # The loss is a scalar, so its gradient is known up to a factor already here: one
    # pass gives both, and the backward pass need not make the logits a second time.
    def body(carry, chunk):
        total, d_constants = carry
        x, target, weight = chunk
        logits, pull_back = jax.vjp(unembed, x, *constants)
        sums, gradient = _chunk_terms(logits, target, weight, z_loss)
        d_x, *d_chunk = pull_back(gradient().astype(logits.dtype))
        d_constants = [
            a + b.astype(jnp.float32) for a, b in zip(d_constants, d_chunk, strict=True)
        ]
        return (jax.tree.map(jnp.add, total, sums), d_constants), d_x

    zeros = [jnp.zeros(c.shape, jnp.float32) for c in constants]
    (total, d_constants), d_hidden = jax.lax.scan(
        body, (_zero_sums(), zeros), (hidden, targets, weights)
    )
    d_constants = [
        d.astype(c.dtype) for d, c in zip(d_constants, constants, strict=True)
    ]
    return total, (d_hidden, d_constants)


def _chunked_bwd(unembed, z_loss, residuals, cotangent):
    del unembed, z_loss
    d_hidden, d_constants = jax.tree.map(
        lambda d: (d.astype(jnp.float32) * cotangent.loss).astype(d.dtype), residuals
    )
    return d_hidden, d_constants, None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def chunked_cross_entropy(
    unembed: Unembed,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk: int = 512,
    z_loss: float = 0.0,
) -> LossSums:
    """Cross-entropy of next tokens; logits exist for `chunk` positions at a time.

    Only `loss` is differentiable, in `hidden` and in what `unembed` closes over; the
    other sums are for reporting. The gradient is made chunk by chunk in the forward
    pass, so logits are computed once (Cut Cross-Entropy, arXiv 2411.09009, keeps
    them out of memory in the same way and recomputes them).

    Args:
      unembed: maps hidden [B, C, D] to logits [B, C, vocab], position by position.
      hidden: [B, T, D], any float type.
      targets: i32[B, T]. One outside of the vocabulary makes `loss`, `nats` and
        the gradient NaN if it counts.
      weights: f32[B, T], zero on tokens that don't count.
      chunk: positions of every row whose logits exist at the same time.
      z_loss: weight of log(Z)^2 (PaLM, arXiv 2204.02311, section 5), 0 for none.

    Returns:
      Sums over all tokens.

    Raises:
      ValueError: shapes differ, or `chunk` is less than 1.
    """
    if hidden.shape[:2] != targets.shape or targets.shape != weights.shape:
        raise ValueError(
            f"hidden {hidden.shape}, targets {targets.shape} and weights "
            f"{weights.shape} must agree in [B, T]"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, expected at least 1")
    time = targets.shape[1]
    chunk = min(chunk, time)
    pad = -time % chunk
    # Padded positions weigh nothing.
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))
    weights = jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, pad)))
    example = jax.ShapeDtypeStruct(
        (hidden.shape[0], chunk, hidden.shape[2]), hidden.dtype
    )
    # The weights that `unembed` closes over become arguments, so that the gradient in
    # them can be returned.
    converted, constants = jax.closure_convert(unembed, example)
    return _chunked(
        converted,
        z_loss,
        _to_chunks(hidden, chunk),
        list(constants),
        _to_chunks(targets, chunk),
        _to_chunks(weights, chunk),
    )


def dense_cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, *, z_loss: float = 0.0
) -> LossSums:
    """The same sums from logits [B, T, vocab] that exist already; differentiable."""
    return _chunk_terms(logits, targets, weights, z_loss)[0]

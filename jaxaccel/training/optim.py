"""AdamW with f32 state, a decay mask by name, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from jaxaccel.core.memory import PINNED_HOST, require_pinned_host
from jaxaccel.core.tree import num_stacked_axes
from jaxaccel.training.config import OptimConfig


# Leaves that look like matrices once stacked, or are, and still must not shrink:
# they are gains, time constants, offsets or short filters.
_NEVER_DECAYED = frozenset(
    {"A_log", "D", "bias", "conv_kernel", "dt_bias", "scale", "sinks"}
)


def learning_rate(
    config: OptimConfig, num_steps: int
) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The schedule: step (from 0) -> f32[].

    Args:
      config: peak, shape and warm-up.
      num_steps: length of the run; the last step has the final learning rate.

    Returns:
      A function that jit can trace.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    warmup = config.warmup_steps
    if warmup > num_steps:
        raise ValueError(f"warmup_steps is {warmup}, the run has {num_steps} steps")
    decay_start = warmup
    if config.schedule == "wsd":
        decay_start = max(warmup, num_steps - round(config.decay_fraction * num_steps))
    decay_steps = max(num_steps - 1 - decay_start, 1)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step).astype(jnp.float32)
        # The first step must move too, hence step + 1.
        rise = jnp.minimum((step + 1.0) / (warmup + 1.0), 1.0)
        done = jnp.clip((step - decay_start) / decay_steps, 0.0, 1.0)
        if config.schedule == "cosine":
            left = 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        elif config.schedule == "wsd":
            left = 1.0 - done
        else:
            left = jnp.ones_like(done)
        final = config.final_lr_fraction
        return config.peak_lr * rise * (final + (1.0 - final) * left)

    return schedule


def decay_mask(
    params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    *,
    decay_embeddings: bool = False,
) -> dict[str, bool]:
    """Which parameters weight decay shrinks: matrices that multiply activations.

    Norm scales, biases, `A_log`, `dt_bias`, convolution filters, attention sinks and
    all other vectors don't decay; the token embedding only if asked. A leading
    [num_periods] axis doesn't make a vector a matrix.

    Args:
      params: arrays by name.
      decay_embeddings: whether "embedding" leaves decay.

    Returns:
      A bool by name.
    """

    def decays(name: str, x) -> bool:
        leaf = name.rsplit("/", 1)[-1]
        if leaf in _NEVER_DECAYED or len(x.shape) - num_stacked_axes(name) < 2:
            return False
        return decay_embeddings or leaf != "embedding"

    return {name: decays(name, x) for name, x in params.items()}


def make_optimizer(config: OptimConfig, num_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW.

    Give `init` and `update` f32 trees: the moments take the type of what they are
    given, and they must be f32 whatever the parameters are (`step.py` casts).

    Args:
      config: see `OptimConfig`.
      num_steps: length of the run, for the schedule.

    Returns:
      An optax transformation over named parameters.
    """
    parts = []
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    parts.append(_join_moments(adam, config.join_below))
    if config.weight_decay:

        def mask(params):
            return decay_mask(params, decay_embeddings=config.decay_embeddings)

        parts.append(optax.add_decayed_weights(config.weight_decay, mask=mask))
    parts.append(optax.scale_by_learning_rate(learning_rate(config, num_steps)))
    chained = optax.chain(*parts)

    def update(updates, state, params=None):
        # optax raises a float to its int32 step count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chained.update(updates, state, params)

    return optax.GradientTransformation(chained.init, update)


def _join_moments(
    inner: optax.GradientTransformation, below: int
) -> optax.GradientTransformation:
    """`inner`, with the state of all parameters of fewer elements in one vector."""

    def split(params):
        small = jax.tree.map(lambda x: x.size < below, params)
        if not any(jax.tree.leaves(small)):
            return inner
        large = jax.tree.map(lambda joined: not joined, small)
        return optax.chain(
            optax.masked(optax.flatten(inner), small), optax.masked(inner, large)
        )

    def update(updates, state, params=None):
        return split(updates).update(updates, state, params)

    return optax.GradientTransformation(
        lambda params: split(params).init(params), update
    )


def move_optimizer_state(state: optax.OptState, space: jax.memory.Space):
    """Moves the arrays of an optimizer's state; its counters stay where they are.

    Args:
      state: of `make_optimizer`, traced.
      space: `jax.memory.Space.Host` between steps, `Device` within one.
    """
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)


def host_shardings(shardings, state: optax.OptState):
    """The shardings of `move_optimizer_state`'s result, see `state_shardings`.

    Args:
      shardings: tree like `state`, of shardings in device memory.
      state: the (abstract) state.

    Returns:
      The tree with the arrays in pinned host memory.

    Raises:
      NotImplementedError: a device has no such memory.
    """

    def on_host(sharding, x):
        if not x.ndim:
            return sharding
        require_pinned_host(sharding.addressable_devices, "optimizer_on_host=True")
        return sharding.with_memory_kind(PINNED_HOST)

    return jax.tree.map(on_host, shardings, state)


def host_state_bytes(shardings, state: optax.OptState) -> int:
    """Bytes of this process's pinned memory that such a state takes."""

    def size(sharding, x):
        if sharding.memory_kind != PINNED_HOST:
            return 0
        one = math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
        return one * len(sharding.addressable_devices)

    return sum(jax.tree.leaves(jax.tree.map(size, shardings, state)))

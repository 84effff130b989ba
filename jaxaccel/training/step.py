"""One training step as a pure function of (state, batch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxaccel.core.sharding import (
    constrain_rows,
    like_parameters,
    parameter_shardings,
)
from jaxaccel.core.tree import (
    ModelParts,
    cast_floats,
    num_stacked_axes,
    split_model,
)
from jaxaccel.data.batch import PackedBatch
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.losses import LossSums, chunked_cross_entropy
from jaxaccel.training.optim import (
    host_shardings,
    learning_rate,
    move_optimizer_state,
)
from jaxaccel.training.table_step import TableTraining, first_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: i32[], optimizer steps done.
      params: parameters by name.
      opt_state: state of the optimizer, f32.
      rng: typed key; each step splits one off for its loss.
      ema: f32 running mean of the parameters by name, or `None`.
      buffers: variables that no gradient reaches, by name: router biases.
      finite: bool[], false from the first step on whose loss or gradient is not
        finite. That step and all later ones leave the state as it was, so that the
        state which produced the NaN is there to be looked at.
    """

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: optax.OptState
    rng: jax.Array
    ema: dict[str, jax.Array] | None
    buffers: dict[str, jax.Array]
    finite: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """What sums over a whole batch are divided by, known before the first gradient.

    Attributes:
      weight: f32[], sum of the loss mask.
      mtp_weight: f32[], sum of the mask of second-next tokens.
      tokens: f32[], tokens that are not padding.
    """

    weight: jax.Array
    mtp_weight: jax.Array
    tokens: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSums:
    """Sums over the tokens of a micro-batch; adding them up gives those of the batch.

    Attributes:
      loss: f32[], this micro-batch's part of the loss that is differentiated.
      nats: f32[], sum of -log p(target) over counted targets.
      correct: f32[], counted targets that had the largest logit.
      bytes: f32[], UTF-8 bytes that the counted targets stand for.
      mtp_nats: f32[], the same as `nats` for the second-next token.
      balance: f32[], part of the routers' balance loss, mean over layers.
      counts: i32[L, E], tokens that each expert of each layer got, or `None`.
      mtp_counts: i32[E], the same for the multi-token prediction block.
      overflow: i32[L], rows of each layer that found no room, or `None`; that block's
        are behind the layers'.
    """

    loss: jax.Array
    nats: jax.Array
    correct: jax.Array
    bytes: jax.Array
    mtp_nats: jax.Array
    balance: jax.Array
    counts: jax.Array | None
    mtp_counts: jax.Array | None
    overflow: jax.Array | None = None


Loss = Callable[..., tuple[jax.Array, BatchSums]]
Metrics = dict[str, jax.Array]
# Of each row of `BatchSums.counts`: position in `Decoder.layers`, and row there.
Places = Sequence[tuple[int, int]]


def second_next(batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
    """Targets and weights of the token after the next one.

    Args:
      batch: rows [B, T].

    Returns:
      (targets i32[B, T - 1], weights f32[B, T - 1]); the weight is zero where the
      document ends before.
    """
    same = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
    both = batch.loss_mask[:, :-1] * batch.loss_mask[:, 1:]
    return batch.targets[:, 1:], jnp.where(same, both, 0.0)


def batch_totals(batch: PackedBatch) -> BatchTotals:
    """The normalisers of a whole batch."""
    return BatchTotals(
        weight=jnp.maximum(jnp.sum(batch.loss_mask), 1.0),
        mtp_weight=jnp.maximum(jnp.sum(second_next(batch)[1]), 1.0),
        tokens=jnp.maximum(_num_tokens(batch), 1.0),
    )


def _num_tokens(batch: PackedBatch) -> jax.Array:
    return jnp.sum((batch.segment_ids > 0).astype(jnp.float32))


def language_model_loss(
    model: Any,
    batch: PackedBatch,
    totals: BatchTotals,
    rng: jax.Array,
    config: TrainConfig,
) -> tuple[jax.Array, BatchSums]:
    """Next-token cross-entropy, router losses and multi-token prediction.

    Args:
      model: a `Decoder`.
      batch: one micro-batch [B, T].
      totals: normalisers of the whole batch, so that the parts add up to its mean.
      rng: key of this micro-batch; the default loss draws nothing.
      config: weights of the parts.

    Returns:
      This micro-batch's part of the loss, and its sums.
    """
    del rng
    output = model(batch.tokens, batch.segment_ids, batch.positions)
    hidden = constrain_rows(output.hidden)  # [B, T, D]
    sums = chunked_cross_entropy(
        model.unembed,
        hidden,
        batch.targets,
        batch.loss_mask,
        chunk=config.loss_chunk,
        z_loss=config.z_loss,
    )
    loss = sums.loss / totals.weight
    zero = jnp.zeros((), jnp.float32)
    balance, mtp_nats, mtp_counts, overflow = zero, zero, None, None
    # Means over tokens add up when weighted by the share of the batch's tokens.
    share = _num_tokens(batch) / totals.tokens
    aux = output.aux
    if aux is not None:
        balance = share * jnp.mean(aux.balance_loss)
        loss = loss + balance + share * jnp.mean(aux.z_loss)
        overflow = aux.overflow
    if config.mtp_loss_weight:
        mtp, mtp_aux = _mtp_sums(model, batch, output.hidden, config)
        mtp_nats = mtp.nats
        mtp_loss = mtp.loss / totals.mtp_weight
        if mtp_aux is not None:
            mtp_loss = mtp_loss + share * (mtp_aux.balance_loss + mtp_aux.z_loss)
            mtp_counts = mtp_aux.counts
            if overflow is not None:
                overflow = jnp.append(overflow, mtp_aux.overflow)
        loss = loss + config.mtp_loss_weight * mtp_loss
    return loss, BatchSums(
        loss=loss,
        nats=sums.nats,
        correct=sums.correct,
        bytes=_counted_bytes(batch),
        mtp_nats=mtp_nats,
        balance=balance,
        counts=None if aux is None else aux.counts,
        mtp_counts=mtp_counts,
        overflow=overflow,
    )


def _mtp_sums(model: Any, batch: PackedBatch, hidden: jax.Array, config: TrainConfig):
    """Cross-entropy of second-next tokens, and the report of the block's router."""
    hidden, aux = model.mtp_hidden(
        hidden, batch.tokens, batch.segment_ids, batch.positions
    )  # [B, T - 1, D]
    targets, weights = second_next(batch)
    sums: LossSums = chunked_cross_entropy(
        model.unembed, hidden, targets, weights, chunk=config.loss_chunk
    )
    return sums, aux


def _counted_bytes(batch: PackedBatch) -> jax.Array:
    return jnp.sum(jnp.where(batch.loss_mask > 0, batch.num_bytes, 0.0))


def _micro_batches(batch: PackedBatch, accumulation: int) -> PackedBatch:
    """[B, ...] -> [accumulation, B / accumulation, ...].

    Micro-batch i takes every accumulation-th row, from row i on: each device then
    keeps the rows that it has.
    """

    def split(x):
        rows = x.shape[0] // accumulation
        return jnp.swapaxes(x.reshape(rows, accumulation, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def update_router_biases(
    buffers: Mapping[str, jax.Array],
    sums: BatchSums,
    rate: float,
    places: Places = (),
) -> dict[str, jax.Array]:
    """Loss-free balancing, b += rate * sign(mean(c) - c) (arXiv 2408.15664).

    Args:
      buffers: arrays by name; "layers/<position>/mlp/router/bias" are f32[P, E],
        "mtp/block/mlp/router/bias" is f32[E].
      sums: counts of the whole batch, over all devices and micro-batches.
      rate: size of the change.
      places: `DecoderConfig.router_places`; empty where every position of the pattern
        has a router and layers come period by period.

    Returns:
      The buffers with their new biases.
    """

    def moved(bias: jax.Array, counts: jax.Array) -> jax.Array:
        # In integers: compiled, a float mean of equal counts may miss them by a bit,
        # and all biases would move.
        total = jnp.sum(counts, axis=-1, keepdims=True)
        below, rest = jnp.divmod(total, counts.shape[-1])  # the mean, rounded down
        above = below + (rest > 0).astype(jnp.int32)
        excess = (counts > below).astype(jnp.int32) - (counts < above).astype(jnp.int32)
        return bias - rate * excess.astype(bias.dtype)

    counts = _router_counts(buffers, sums, "router/bias", places)
    return {**buffers, **{n: moved(buffers[n], c) for n, c in counts.items()}}


def _router_places(parts: ModelParts) -> Places:
    """Where a model's routers are; empty for one that is no `Decoder`."""
    model: Any = nnx.merge(parts.graphdef, parts.params, parts.buffers)
    return getattr(getattr(model, "config", None), "router_places", ())


def _router_counts(
    buffers: Mapping[str, jax.Array], sums: BatchSums, ending: str, places: Places
) -> dict[str, jax.Array]:
    """The counts behind each buffer whose name ends so, i32[P, E] or i32[E]."""
    found = {}
    names = [name for name in buffers if name.endswith(ending)]
    stacked = [name for name in names if num_stacked_axes(name)]
    if stacked and sums.counts is not None:
        stacked.sort(key=lambda name: int(name.split("/")[1]))
        count = len(stacked)
        # Layers come period by period, so positions alternate within a period.
        rows = [
            int(stacked[layer % count].split("/")[1])
            if not places
            else places[layer][0]
            for layer in range(sums.counts.shape[0])
        ]
        for name in stacked:
            position = int(name.split("/")[1])
            of_name = [row for row, place in enumerate(rows) if place == position]
            found[name] = sums.counts[jnp.asarray(of_name)]  # [P, E]
    for name in names:
        if name not in stacked and sums.mtp_counts is not None:
            found[name] = sums.mtp_counts
    return found


def _gradients(parts, config, loss, state, batch, rng):
    """f32 gradients and sums of a whole batch, micro-batch by micro-batch."""
    totals = batch_totals(batch)
    places = _router_places(parts)

    def part(params, batch, rng, buffers):
        model = parts.merge(params, buffers)
        return loss(model, batch, totals, rng, config)

    def gradient(batch, rng, buffers=state.buffers):
        grads, sums = jax.grad(part, has_aux=True)(state.params, batch, rng, buffers)
        return cast_floats(grads, jnp.float32), sums

    if config.accumulation == 1:
        return *gradient(batch, rng), totals
    micro = _micro_batches(batch, config.accumulation)
    rngs = jax.random.split(rng, config.accumulation)
    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], micro), rngs[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def accumulate(carry, xs):
        # Routers whose loss looks at the whole batch see what came before.
        loads = _router_counts(state.buffers, carry[1], "router/load", places)
        batch, rng = xs
        new = gradient(batch, rng, {**state.buffers, **loads})
        return jax.tree.map(jnp.add, carry, new), None

    (grads, sums), _ = jax.lax.scan(accumulate, zeros, (micro, rngs))
    return grads, sums, totals


def _metrics(sums: BatchSums, totals: BatchTotals, config: TrainConfig) -> Metrics:
    metrics = {
        "loss": sums.loss,
        "nats_per_token": sums.nats / totals.weight,
        "nats_per_byte": sums.nats / jnp.maximum(sums.bytes, 1.0),
        "accuracy": sums.correct / totals.weight,
        "tokens": totals.tokens,
    }
    if config.mtp_loss_weight:
        metrics["mtp_nats_per_token"] = sums.mtp_nats / totals.mtp_weight
    if sums.counts is not None:
        load = sums.counts.astype(jnp.float32)  # [L, E]
        total = jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1.0)
        share = load / total
        entropy = -jnp.sum(share * jnp.log(jnp.maximum(share, 1e-30)), axis=-1)
        metrics["router_balance_loss"] = sums.balance
        metrics["router_entropy"] = jnp.mean(entropy)
        metrics["router_max_violation"] = jnp.max(share) * load.shape[-1] - 1.0
        metrics["router_dead_experts"] = jnp.sum((load == 0).astype(jnp.float32))
        metrics["router_min_load"] = jnp.min(share) * load.shape[-1]
    if sums.overflow is not None and sums.counts is not None:
        lost = jnp.sum(sums.overflow).astype(jnp.float32)
        routed = jnp.sum(sums.counts.astype(jnp.float32))
        if sums.mtp_counts is not None:
            routed = routed + jnp.sum(sums.mtp_counts.astype(jnp.float32))
        metrics["router_overflow"] = lost / jnp.maximum(routed, 1.0)
    return metrics


def make_train_step(
    parts: ModelParts,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    *,
    router_bias_rate: float = 0.0,
    loss: Loss = language_model_loss,
) -> Callable[[TrainState, PackedBatch], tuple[TrainState, Metrics]]:
    """Builds the step; jit it with `donate_argnums=0`.

    Args:
      parts: the model taken apart.
      optimizer: works on f32 trees of named arrays.
      config: accumulation, loss weights, EMA.
      router_bias_rate: step of the router biases, 0 leaves them.
      loss: see `language_model_loss`; another objective takes its place here.

    Returns:
      A pure function (state, batch [B, T] of all devices) -> (state, metrics f32[]).
    """
    tables = TableTraining.of(parts, config)
    if tables is not None:
        small = make_train_step(
            tables.parts,
            tables.optimizer(optimizer),
            config,
            router_bias_rate=router_bias_rate,
            loss=tables.loss(loss),
        )
        return tables.around(small)
    schedule = learning_rate(config.optim, config.num_steps)
    places = _router_places(parts)

    def moved(state: TrainState, space: jax.memory.Space) -> TrainState:
        if not config.optimizer_on_host:
            return state
        opt_state = move_optimizer_state(state.opt_state, space)
        return dataclasses.replace(state, opt_state=opt_state)

    def train_step(state: TrainState, batch: PackedBatch):
        state = moved(state, jax.memory.Space.Device)
        next_rng, rng = jax.random.split(state.rng)
        grads, sums, totals = _gradients(parts, config, loss, state, batch, rng)
        grad_norm = optax.tree.norm(grads)
        full = cast_floats(state.params, jnp.float32)
        updates, opt_state = optimizer.update(grads, state.opt_state, full)
        new = jax.tree.map(jnp.add, full, updates)
        ema = state.ema
        if ema is not None and config.ema_decay is not None:
            decay = config.ema_decay
            ema = jax.tree.map(lambda e, p: decay * e + (1.0 - decay) * p, ema, new)
        changed = TrainState(
            step=state.step + 1,
            params=jax.tree.map(lambda n, p: n.astype(p.dtype), new, state.params),
            opt_state=opt_state,
            rng=next_rng,
            ema=ema,
            buffers=update_router_biases(state.buffers, sums, router_bias_rate, places),
            finite=state.finite,
        )
        finite = state.finite & jnp.isfinite(sums.loss) & jnp.isfinite(grad_norm)
        kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), changed, state)
        metrics = _metrics(sums, totals, config)
        metrics |= {"grad_norm": grad_norm, "lr": schedule(state.step)}
        metrics["finite"] = finite.astype(jnp.float32)
        kept = moved(kept, jax.memory.Space.Host)
        return dataclasses.replace(kept, finite=finite), metrics

    return train_step


def make_eval_step(
    parts: ModelParts, config: TrainConfig
) -> Callable[[Mapping, Mapping, PackedBatch], Metrics]:
    """Builds (params, buffers, batch) -> sums "nats", "correct", "weight", "bytes"."""

    def eval_step(params, buffers, batch: PackedBatch) -> Metrics:
        model: Any = parts.merge(params, buffers)
        output = model(batch.tokens, batch.segment_ids, batch.positions)
        sums = chunked_cross_entropy(
            model.unembed,
            constrain_rows(output.hidden),
            batch.targets,
            batch.loss_mask,
            chunk=config.loss_chunk,
        )
        return {
            "nats": sums.nats,
            "correct": sums.correct,
            "weight": sums.weight,
            "bytes": _counted_bytes(batch),
        }

    return eval_step


def make_init(
    build: Callable[[jax.Array], nnx.Module],
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
) -> Callable[[], TrainState]:
    """Builds the function that makes the first state; jit it with `out_shardings`.

    Args:
      build: key -> model with fresh parameters.
      optimizer: as for `make_train_step`.
      config: seed and EMA.

    Returns:
      () -> state at step 0.
    """

    def init() -> TrainState:
        model_key, rng = jax.random.split(jax.random.key(config.seed))
        model = build(model_key)
        params, buffers = split_model(model)
        full = cast_floats(params, jnp.float32)
        opt_state = first_state(optimizer.init(full), model, buffers)
        if config.optimizer_on_host:
            opt_state = move_optimizer_state(opt_state, jax.memory.Space.Host)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            rng=rng,
            ema=full if config.ema_decay is not None else None,
            buffers=buffers,
            finite=jnp.ones((), bool),
        )

    return init


def state_shardings(state: TrainState, mesh: Mesh, config: TrainConfig) -> TrainState:
    """Where each array of an (abstract) state lies; see `core.sharding`.

    Raises:
      ValueError: a mesh axis does not divide a parameter's dimension.
      NotImplementedError: the optimizer's state is to lie on the host, and a device
        has no pinned host memory.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    params = parameter_shardings(
        state.params,
        mesh,
        replicate_indivisible=config.mesh.replicate_indivisible,
    )
    opt_state = like_parameters(state.opt_state, params, state.params, mesh)
    if config.optimizer_on_host:
        opt_state = host_shardings(opt_state, state.opt_state)
    return TrainState(
        step=replicated,  # pyrefly: ignore
        params=params,  # pyrefly: ignore
        opt_state=opt_state,
        rng=replicated,  # pyrefly: ignore
        ema=params if state.ema is not None else None,  # pyrefly: ignore
        buffers=jax.tree.map(lambda _: replicated, state.buffers),
        finite=replicated,  # pyrefly: ignore
    )

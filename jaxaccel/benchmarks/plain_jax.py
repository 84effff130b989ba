"""The Qwen3-Next-style model as plain functions over a dictionary of arrays.

What the framework is measured against: the same arithmetic, the same ops, the same
rematerialisation, loss and optimizer, with no modules, no config machinery and no loop
around it. The parameters are those of a `Decoder` by name, so that both run the very
same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccel.models.config import DecoderConfig
from jaxaccel.nn.router import MoEConfig
from jaxaccel.training.losses import chunked_cross_entropy
from pallas_kernels.attention import attention
from pallas_kernels.causal_conv1d import causal_conv1d
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.sort_dispatch import combine, permute, sort_dispatch


Params = dict[str, Any]


def nested(flat: dict[str, jax.Array]) -> Params:
    """Turns `{"layers/0/mixer/...": array}` into dictionaries of dictionaries."""
    tree: Params = {}
    for name, array in flat.items():
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = array
    return tree


def dense(x, kernel, dtype, out_dtype=None):
    return jnp.einsum(
        "...d,df->...f",
        x.astype(dtype),
        kernel.astype(dtype),
        preferred_element_type=dtype if out_dtype is None else out_dtype,
    )


def swiglu(gate, up):
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(
        up.dtype
    )


def gdn(p: Params, x, segments, is_first, c: DecoderConfig):
    """Gated DeltaNet, [B, T, D] -> [B, T, D]."""
    n, dtype = c.gdn, c.compute_dtype
    assert n is not None
    B, T, _ = x.shape
    real = (segments > 0)[:, :, None]
    x = jnp.where(real, x, jnp.zeros((), x.dtype))
    a = dense(x, p["a_proj"]["kernel"], dtype, jnp.float32)
    b = dense(x, p["b_proj"]["kernel"], dtype, jnp.float32)
    g = -jnp.exp(p["A_log"])[None, None] * jax.nn.softplus(a + p["dt_bias"][None, None])
    g = jnp.where(real, g, 0.0)
    beta = jnp.where(real, jax.nn.sigmoid(b), 0.0)
    qkv = dense(x, p["qkv_proj"]["kernel"], dtype)
    qkv, _ = causal_conv1d(
        qkv,
        p["conv_kernel"].astype(dtype),
        is_first=is_first,
        is_real=real[..., 0],
        activation="silu",
    )
    dk = n.num_key_heads * n.key_dim
    q, k, v = jnp.split(qkv, (dk, 2 * dk), axis=-1)

    def unit(y):
        y = y.reshape(B, T, n.num_key_heads, n.key_dim).astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6)
        return y.astype(dtype)

    v = v.reshape(B, T, n.num_value_heads, n.value_dim)
    o, _ = gated_delta_rule(
        unit(q), unit(k), v, g, beta, is_first=is_first, chunk_size=n.chunk_size
    )
    z = dense(x, p["z_proj"]["kernel"], dtype).reshape(v.shape)
    o = rms_norm(o, p["norm"]["scale"], eps=c.norm_eps, gate=z)
    return dense(o.reshape(B, T, -1), p["out_proj"]["kernel"], dtype)


def rope(x, positions, theta, fraction):
    half = int(x.shape[-1] * fraction) // 2
    frequency = theta ** (-np.arange(half) / half)
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(
        frequency, jnp.float32
    ).reshape(1, 1, 1, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1 = x[..., :half].astype(jnp.float32)
    x2 = x[..., half : 2 * half].astype(jnp.float32)
    y = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([y.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def gated_attention(p: Params, x, segments, positions, c: DecoderConfig):
    """Grouped-query attention with qk-norm and output gate."""
    n, dtype = c.attention, c.compute_dtype
    assert n is not None
    assert n.rope is not None
    B, T, _ = x.shape

    def heads(name, count):
        y = dense(x, p[name]["kernel"], dtype)
        return y.reshape(B, T, count, n.head_dim)

    def norm(y, name):
        return rms_norm(
            y, p[name]["scale"], eps=c.norm_eps, zero_centered=c.zero_centered_norms
        )

    q = norm(heads("q_proj", n.num_heads), "q_norm")
    k = norm(heads("k_proj", n.num_kv_heads), "k_norm")
    v = heads("v_proj", n.num_kv_heads)
    q = rope(q, positions, n.rope.theta, n.rope.fraction)
    k = rope(k, positions, n.rope.theta, n.rope.fraction)
    o = attention(q, k, v, q_segment_ids=segments, kv_segment_ids=segments, causal=True)
    gate = jax.nn.sigmoid(dense(x, p["gate_proj"]["kernel"], dtype, jnp.float32))
    o = (o.reshape(B, T, -1).astype(jnp.float32) * gate).astype(dtype)
    return dense(o, p["o_proj"]["kernel"], dtype)


def mlp(p: Params, x, dtype):
    up = dense(x, p["up_proj"]["kernel"], dtype)
    gate = dense(x, p["gate_proj"]["kernel"], dtype)
    return dense(swiglu(gate, up), p["down_proj"]["kernel"], dtype)


def moe(p: Params, x, segments, c: DecoderConfig):
    """Softmax router, top k, sorted experts, gated shared expert."""
    n, dtype = c.mlp, c.compute_dtype
    assert isinstance(n, MoEConfig)
    real = segments > 0
    logits = jnp.einsum(
        "btd,de->bte",
        x.astype(jnp.float32),
        p["router"]["kernel"],
        precision=jax.lax.Precision.HIGHEST,
    )
    scores = jax.nn.softmax(logits, axis=-1)
    weights, ids = jax.lax.top_k(scores, n.top_k)
    if n.normalize_weights and n.top_k > 1:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    ids = jnp.where(real[..., None], ids, n.num_experts)
    weights = jnp.where(real[..., None], weights * n.scale, 0.0)
    plan = sort_dispatch(ids.reshape(-1, n.top_k), n.num_experts)
    rows = permute(x.reshape(-1, x.shape[-1]), plan)
    hidden = grouped_matmul(rows, p["w_in"].astype(dtype), plan.group_sizes)
    hidden = swiglu(*jnp.split(hidden, 2, axis=-1))
    out = grouped_matmul(hidden, p["w_out"].astype(dtype), plan.group_sizes)
    y = combine(out, plan, weights.reshape(-1, n.top_k)).reshape(x.shape)
    if n.shared_d_ff:
        shared = mlp(p["shared"], x, dtype)
        if n.shared_gate:
            gate = dense(x, p["shared_gate"]["kernel"], dtype, jnp.float32)
            shared = shared.astype(jnp.float32) * jax.nn.sigmoid(gate)
        y = y + shared.astype(dtype)
    balance = jnp.zeros((), jnp.float32)
    if n.balance_loss_coef:
        tokens = jnp.sum(real, dtype=jnp.float32)
        mass = jnp.einsum("bte,bt->e", scores, real.astype(jnp.float32))
        load = plan.group_sizes.astype(jnp.float32)
        balance = n.num_experts * jnp.sum(mass * load) / (n.top_k * tokens**2)
        balance = n.balance_loss_coef * balance
    return y, balance


def block(p: Params, x, segments, positions, is_first, mixer: str, c: DecoderConfig):
    """One layer; returns its output and its router's loss."""

    def norm(y, name):
        return rms_norm(
            y, p[name]["scale"], eps=c.norm_eps, zero_centered=c.zero_centered_norms
        )

    h = norm(x, "mixer_norm")
    if mixer == "gdn":
        x = x + gdn(p["mixer"], h, segments, is_first, c)
    else:
        x = x + gated_attention(p["mixer"], h, segments, positions, c)
    h = norm(x, "mlp_norm")
    if isinstance(c.mlp, MoEConfig):
        y, balance = moe(p["mlp"], h, segments, c)
    else:
        y, balance = mlp(p["mlp"], h, c.compute_dtype), jnp.zeros((), jnp.float32)
    return x + y, balance


def hidden_states(p: Params, tokens, segments, positions, c: DecoderConfig):
    """The trunk: [B, T] tokens -> [B, T, D] after the final norm, router losses."""
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_first = (segments > 0) & (segments != before)
    x = jnp.take(p["embed"]["embedding"], tokens, axis=0).astype(c.compute_dtype)

    def period(x, layers):
        losses = []
        for i, mixer in enumerate(c.pattern):

            def run(p, x, mixer=mixer):
                return block(p, x, segments, positions, is_first, mixer, c)

            if c.remat_policy == "full":
                run = jax.checkpoint(run, prevent_cse=False)
            x, loss = run(layers[i], x)
            losses.append(loss)
        return x, jnp.stack(losses)

    layers = [p["layers"][str(i)] for i in range(len(c.pattern))]
    x, losses = jax.lax.scan(period, x, layers)
    x = rms_norm(
        x,
        p["final_norm"]["scale"],
        eps=c.norm_eps,
        zero_centered=c.zero_centered_norms,
    )
    return x, jnp.mean(losses)


def make_step(
    c: DecoderConfig, optimizer: optax.GradientTransformation, *, chunk: int
) -> Callable:
    """Returns a jitted `step(params, opt_state, batch) -> (params, opt_state, loss)`.

    `batch` holds tokens, targets, segment_ids, positions (i32[B, T]) and loss_mask
    (f32[B, T]) as a dictionary; parameters and optimizer state are donated.
    """

    def loss(flat, batch):
        p = nested(flat)
        hidden, balance = hidden_states(
            p, batch["tokens"], batch["segment_ids"], batch["positions"], c
        )
        table = (
            p["embed"]["embedding"].T if c.tie_embeddings else p["lm_head"]["kernel"]
        )
        total = chunked_cross_entropy(
            lambda h: dense(h, table, c.compute_dtype, jnp.float32),
            hidden,
            batch["targets"],
            batch["loss_mask"],
            chunk=chunk,
        ).loss
        nll = total / jnp.sum(batch["loss_mask"])
        return nll + balance, nll

    def step(p, opt_state, batch):
        grads, nll = jax.grad(loss, has_aux=True)(p, batch)
        updates, opt_state = optimizer.update(grads, opt_state, p)
        return optax.apply_updates(p, updates), opt_state, nll

    return jax.jit(step, donate_argnums=(0, 1))

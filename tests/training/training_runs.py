"""A tiny hybrid model, ragged batches and the pieces of a run around them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.core.tree import model_parts
from jaxaccel.data.batch import PackedBatch
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNetConfig
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.router import MoEConfig
from jaxaccel.training.optim import make_optimizer
from jaxaccel.training.step import make_init, make_train_step


VOCAB = 32


def tiny_decoder(**changes) -> DecoderConfig:
    fields = {
        "vocab_size": VOCAB,
        "d_model": 16,
        "num_layers": 2,
        "pattern": ("attention",),
        "attention": AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        "mlp": MLPConfig(d_ff=16),
    }
    return DecoderConfig(**(fields | changes))


def routed_decoder(**changes) -> DecoderConfig:
    experts = MoEConfig(num_experts=4, top_k=2, d_ff=8, bias_update_rate=1e-2)
    return tiny_decoder(**({"mlp": experts} | changes))


def hybrid_decoder(**changes) -> DecoderConfig:
    fields = {
        "pattern": ("gdn", "attention"),
        "gdn": GatedDeltaNetConfig(
            num_key_heads=2, num_value_heads=2, key_dim=4, value_dim=4
        ),
    }
    return routed_decoder(**(fields | changes))


def ragged_batch(rows: int, time: int, seed: int = 0, vocab: int = VOCAB):
    """Rows of documents of unequal lengths, the last ones padded."""
    rng = np.random.default_rng(seed)
    zeros = np.zeros((rows, time), np.int32)
    batch = {
        "tokens": zeros.copy(),
        "targets": zeros.copy(),
        "segment_ids": zeros.copy(),
        "positions": zeros.copy(),
        "loss_mask": zeros.astype(np.float32),
        "num_bytes": zeros.astype(np.float32),
    }
    for row in range(rows):
        start, document = 0, 1
        end = rng.integers(time // 3, time + 1)
        while start < end:
            length = int(min(rng.integers(2, 7), end - start))
            text = rng.integers(0, vocab, length).astype(np.int32)
            place = row, slice(start, start + length)
            batch["tokens"][place] = text
            batch["targets"][place] = np.append(text[1:], 0)
            batch["segment_ids"][place] = document
            batch["positions"][place] = np.arange(length)
            batch["loss_mask"][place] = np.append(np.ones(length - 1), 0)
            batch["num_bytes"][place] = 2.0
            start, document = start + length, document + 1
    return PackedBatch(**batch)


@dataclasses.dataclass(frozen=True)
class ToyOutput:
    hidden: jax.Array
    aux: None = None


class ToyBlock(nnx.Module):
    def __init__(self, periods, width, rngs):
        init = jax.nn.initializers.normal(0.3)
        self.up_proj = nnx.Module()
        self.up_proj.kernel = nnx.Param(init(rngs.params(), (periods, width, width)))
        self.norm = nnx.Module()
        self.norm.scale = nnx.Param(jnp.ones((periods, width)))


class Toy(nnx.Module):
    """The part of the decoder's interface that training uses; compiles at once."""

    def __init__(self, key, *, periods=2, width=16, vocab=VOCAB, dtype="float32"):
        rngs = nnx.Rngs(key)
        init = jax.nn.initializers.normal(0.3)
        self.embed = nnx.Module()
        self.embed.embedding = nnx.Param(init(rngs.params(), (vocab, width), dtype))
        self.layers = nnx.List([ToyBlock(periods, width, rngs)])
        self.lm_head = nnx.Module()
        self.lm_head.kernel = nnx.Param(init(rngs.params(), (width, vocab), dtype))

    def __call__(self, tokens, segments=None, positions=None):
        x = self.embed.embedding[...].at[tokens].get(mode="fill", fill_value=jnp.nan)
        x = x.astype(jnp.float32)

        def block(x, params):
            kernel, scale = params
            h = jnp.einsum("btd,df->btf", x * scale[None, None, :], kernel)
            return x + jnp.tanh(h), None

        layer = self.layers[0]
        stacked = layer.up_proj.kernel[...], layer.norm.scale[...]
        return ToyOutput(hidden=jax.lax.scan(block, x, stacked)[0])

    def unembed(self, x):
        kernel = self.lm_head.kernel[...].astype(jnp.float32)
        return jnp.einsum("btd,dv->btv", x, kernel)


class Run:
    """A model, its step and its first state on one device.

    `model` is a `DecoderConfig`, or a dict of arguments of `Toy`.
    """

    def __init__(self, model, config, *, is_abstract=False, **options):
        def build(key):
            if isinstance(model, DecoderConfig):
                return Decoder(model, rngs=nnx.Rngs(key))
            return Toy(key, **model)

        self.config = config
        self.parts = model_parts(lambda: build(jax.random.key(0)))
        self.optimizer = make_optimizer(config.optim, config.num_steps)
        self.step = make_train_step(self.parts, self.optimizer, config, **options)
        self.jitted = jax.jit(self.step, donate_argnums=0)
        self.init = make_init(build, self.optimizer, config)
        self.state = jax.eval_shape(self.init) if is_abstract else jax.jit(self.init)()

"""Counts against the real model's shapes, and against published figures."""

import dataclasses

import jax
import pytest
from flax import nnx

from jaxaccel.models.decoder import Decoder
from jaxaccel.models.describe import describe
from jaxaccel.models.gpt_oss import GptOssConfig
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.qwen3_next import Qwen3NextConfig
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.training.perf import training_flops_per_token


def variants():
    moe = Qwen3NextConfig.tiny(num_mtp_layers=1).decoder()
    yield moe
    latent = {"bias_update_rate": 0.1, "activation": "relu2", "d_latent": 8}
    yield dataclasses.replace(moe, mlp=dataclasses.replace(moe.mlp, **latent))
    dense = Qwen3_5TextConfig.tiny(
        num_layers=8, tie_embeddings=True, param_dtype="bfloat16", dtype="bfloat16"
    ).decoder()
    yield dense
    attention = dataclasses.replace(
        dense.attention, window=8, sinks=True, use_bias=True, output_gate=False
    )
    yield dataclasses.replace(
        dense, pattern=("gdn", "sliding_attention"), sliding_attention=attention
    )
    yield GptOssConfig.tiny(param_dtype="bfloat16").decoder()
    memory = EngramConfig(layers=(1, 6), bases=(41, 67), table_dtype="bfloat16")
    yield dataclasses.replace(dense, engram=memory)
    yield dataclasses.replace(moe, engram=COMPRESSING)
    yield NemotronHConfig.tiny(state_dtype="bfloat16").decoder()


# As `with_tokenizer` makes it.
COMPRESSING = EngramConfig(
    layers=(2,),
    variant="qwen",
    eos_id=1,
    heads=2,
    head_dim=4,
    bases=41,
    compress=True,
    compressed_size=99,
    pad_class=0,
)


def shapes_of(config):
    return nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize("config", list(variants()))
def test_counts_equal_the_models_shapes(config):
    leaves = jax.tree.leaves(shapes_of(config))
    total = describe(config).total
    assert total.params == sum(leaf.size for leaf in leaves)
    assert total.param_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("config", list(variants()))
def test_cache_bytes_equal_the_caches_shapes(config):
    def caches():
        model = Decoder(config, rngs=nnx.Rngs(0))
        return model.init_cache(1, 4), model.init_cache(1, 8)

    # The number of tokens read, four bytes, is no state of a layer.
    four, eight = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) - 4
        for cache in nnx.eval_shape(caches)
    )
    cost = describe(config).total
    # A slot also keeps its token's position, four bytes a layer of attention.
    attention = sum("attention" in kind for kind in config.layer_types)
    assert eight - four == 4 * (cost.kv_bytes_per_token + 4 * attention)
    assert 2 * four - eight == cost.state_bytes


def test_published_sizes():
    """Counted by hand from the published sizes; 80B-A3B by name."""
    published = Qwen3NextConfig.published(param_dtype="bfloat16")
    total = describe(published.decoder(), seq_len=131_072).total
    assert round(total.params / 1e9, 2) == 79.67
    assert round(total.active_params / 1e9, 2) == 3.56
    assert total.kv_bytes_per_token == 24_576
    state = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert total.state_bytes == 36 * state
    leaves = jax.tree.leaves(shapes_of(published.decoder()))
    assert sum(leaf.size for leaf in leaves) == total.params
    small = Qwen3_5TextConfig.published().decoder()
    assert round(describe(small).total.params / 1e9, 1) == 9.0


def test_operations_of_a_hand_counted_model():
    config = Qwen3_5TextConfig.tiny(pattern=("attention",), num_layers=1).decoder()
    d, h, g, k, f, vocab, length = 32, 2, 1, 16, 64, 128, 9
    projections = 2 * d * (2 * h * k + 2 * g * k) + 2 * h * k * d
    attention = sum(4 * h * k * (t + 1) for t in range(length)) / length
    want = projections + attention + 3 * 2 * d * f + 2 * d * vocab
    found = describe(config, length)
    assert found.trunk.forward_flops == want
    assert found.training_flops == 3 * want
    window = dataclasses.replace(config.attention, window=4)
    found = describe(dataclasses.replace(config, attention=window), length)
    attention = sum(4 * h * k * min(t + 1, 4) for t in range(length)) / length
    want = projections + attention + 3 * 2 * d * f + 2 * d * vocab
    assert found.trunk.forward_flops == pytest.approx(want)


def test_a_memorys_size_costs_no_operations():
    plain = Qwen3_5TextConfig.tiny(pattern=("attention",)).decoder()
    # Its tokenizer's classes are not known yet.
    small = dataclasses.replace(COMPRESSING, compressed_size=None, pad_class=None)
    large = dataclasses.replace(small, bases=4_001)
    without, few, many = (
        describe(dataclasses.replace(plain, engram=engram), 9)
        for engram in (None, small, large)
    )
    columns, d_row, d, taps = 4, 4, 32, 4
    own = 2 * columns * d_row * 2 * d + 2 * taps * d
    assert few.trunk.forward_flops == without.trunk.forward_flops + own
    assert training_flops_per_token(many.config, 9) == 3 * few.trunk.forward_flops
    assert many.total.params - few.total.params > 3_000 * columns * d_row
    assert many.total.active_params == few.total.active_params
    assert "a token reads 4" in many.table()


def test_table_has_a_line_for_every_part():
    config = Qwen3NextConfig.tiny(num_mtp_layers=1).decoder()
    found = describe(config, 128)
    text = found.table()
    for row in found.rows:
        assert row.name in text
    assert f"{found.total.params:,}" in text
    assert "128 tokens" in text
    # The prediction block drafts; the next token does not pay for it.
    assert found.trunk.params < found.total.params
    with pytest.raises(ValueError, match="seq_len=0"):
        describe(config, 0)

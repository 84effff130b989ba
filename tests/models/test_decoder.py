"""The decoder as a whole: scan, caches, packing, remat, prediction head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sequence_checks import T, only, same, shift

from jaxaccel.data.batch import AttentionTiles, ChunkStarts, packing_metadata
from jaxaccel.models.config import DecoderConfig, RematPolicy
from jaxaccel.models.decoder import Decoder, init_decoder
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNetConfig
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.rope import RopeConfig
from jaxaccel.nn.router import MoEConfig, RouterBias


VOCAB = 29
MATRICES = {"kernel", "embedding", "w_in", "w_out", "conv_kernel"}
# Four layers add up what one mixer rounds.
_same = functools.partial(same, atol=5e-4)


def _config(**changes):
    settings = {
        "vocab_size": VOCAB,
        "d_model": 12,
        "num_layers": 4,
        "pattern": ("gdn", "attention"),
        "gdn": GatedDeltaNetConfig(
            num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=6
        ),
        "attention": AttentionConfig(
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            rope=RopeConfig(fraction=0.5),
            qk_norm=True,
            output_gate=True,
        ),
        "mlp": MLPConfig(d_ff=16),
        "zero_centered_norms": True,
    }
    return DecoderConfig(**(settings | changes))


MOE = MoEConfig(
    num_experts=4,
    top_k=2,
    d_ff=8,
    shared_d_ff=8,
    shared_gate=True,
    bias_update_rate=1e-3,
    balance_loss_coef=1e-2,
)


def _parts(config):
    """GraphDef and state with random parameters that nothing had to compile."""
    draw = np.random.default_rng(0)

    def leaf(path, abstract):
        name = [key.key for key in path if hasattr(key, "key")][-1]
        value = draw.normal(size=abstract.shape)
        if name in MATRICES:
            value *= abstract.shape[-2] ** -0.5
        else:
            value = 0.5 + 0.3 * value
        return jnp.asarray(value, abstract.dtype)

    graphdef, abstract = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    )
    return graphdef, jax.tree_util.tree_map_with_path(leaf, abstract)


class Compiled:
    """A decoder as pure compiled functions of its state."""

    def __init__(self, config):
        graphdef, self.state = _parts(config)
        self.graphdef, self.config = graphdef, config

        def packed(state, tokens, segments):
            out = nnx.merge(graphdef, state)(
                tokens, segments, output_hidden_states=True
            )
            return out.logits, out.hidden_states

        def cached(state, tokens, segments, cache):
            out = nnx.merge(graphdef, state)(tokens, segments, cache=cache)
            return out.logits, out.cache

        self.packed, self.cached = jax.jit(packed), jax.jit(cached)

    def merge(self):
        return nnx.merge(self.graphdef, self.state)


@pytest.fixture(scope="module")
def decoder():
    return Compiled(_config())


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(0), (2, T), 0, VOCAB)


@pytest.fixture(scope="module")
def stepped(decoder, tokens):
    """Logits and caches of feeding one token at a time."""
    cache = decoder.merge().init_cache(2, T)
    one = jnp.ones((2, 1), jnp.int32)
    outputs, caches = [], {}
    for t in range(T):
        logits, cache = decoder.cached(decoder.state, tokens[:, t : t + 1], one, cache)
        outputs.append(logits)
        caches[t + 1] = cache
    return np.concatenate(outputs, axis=1), caches


def _row(cache, row):
    """One row of a cache: batch is the second axis of the layers' leaves."""
    # By NumPy, as `outputs` are: JAX would compile each place and length.
    layers = jax.tree.map(lambda leaf: np.asarray(leaf)[:, row], cache.layers)
    return layers, np.asarray(cache.length)[row]


@pytest.fixture(scope="module")
def packed_whole(decoder, tokens):
    """Logits and hidden states of both rows as one document each, without a cache."""
    return decoder.packed(decoder.state, tokens, jnp.ones((2, T), jnp.int32))


def test_steps_and_one_prefill_agree(decoder, tokens, stepped, packed_whole):
    outputs, caches = stepped
    _same(packed_whole[0], outputs)
    ones = jnp.ones((2, T), jnp.int32)
    cache = decoder.merge().init_cache(2, T)
    _same(decoder.cached(decoder.state, tokens, ones, cache), (outputs, caches[T]))


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129])
def test_right_padded_prefill_then_the_rest(decoder, tokens, stepped, n):
    outputs, caches = stepped
    lengths = [n, max(1, n - 10)]
    cache = decoder.merge().init_cache(2, T)
    logits, cache = decoder.cached(decoder.state, tokens, only(lengths), cache)
    for row, count in enumerate(lengths):
        _same(np.asarray(logits)[row, :count], outputs[row, :count])
        _same(_row(cache, row), _row(caches[count], row))
    rest = [T - count for count in lengths]
    logits, cache = decoder.cached(
        decoder.state, shift(tokens, lengths), only(rest), cache
    )
    for row, count in enumerate(rest):
        _same(np.asarray(logits)[row, :count], outputs[row, T - count :])
    _same(cache, caches[T])


def test_left_padding_changes_nothing(decoder, tokens, stepped):
    outputs, caches = stepped
    lengths = [127, 64]
    moved = shift(tokens, [n - T for n in lengths])
    cache = decoder.merge().init_cache(2, T)
    logits, cache = decoder.cached(
        decoder.state, moved, only(lengths, left=True), cache
    )
    for row, count in enumerate(lengths):
        _same(np.asarray(logits)[row, T - count :], outputs[row, :count])
        _same(_row(cache, row), _row(caches[count], row))


def test_reset_rows_start_over(decoder, tokens, stepped):
    outputs, caches = stepped
    cache = caches[65].reset(jnp.array([True, False]))
    feed = jnp.stack([tokens[0, :1], tokens[1, 65:66]])
    logits, _ = decoder.cached(decoder.state, feed, jnp.ones_like(feed), cache)
    _same(logits[:, 0], np.stack([outputs[0, 0], outputs[1, 65]]))


def test_packed_documents_equal_separate_ones(decoder, tokens):
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 2, 3]], [50, 65, 15], axis=1))
    logits, _ = decoder.packed(decoder.state, tokens, segments)
    alone = shift(tokens, [50, 50])
    separate, _ = decoder.packed(decoder.state, alone, only([65, 65]))
    _same(logits[:, 50:115], separate[:, :65])
    other = jnp.where(segments == 1, (tokens + 1) % VOCAB, tokens)
    moved, _ = decoder.packed(decoder.state, other, segments)
    np.testing.assert_array_equal(moved[:, 50:115], logits[:, 50:115])
    assert float(jnp.abs(moved[:, :50] - logits[:, :50]).max()) > 0.1


def test_ids_that_come_back_are_new_documents(decoder, tokens):
    def logits(ids):
        segments = jnp.asarray(np.repeat(ids, [50, 30, 50], axis=1), jnp.int32)
        return np.asarray(decoder.packed(decoder.state, tokens, segments)[0])

    got, want = logits([[7, 2, 7], [1, -4, 1]]), logits([[1, 2, 3], [1, 0, 2]])
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(
        np.delete(got[1], range(50, 80), axis=0),
        np.delete(want[1], range(50, 80), axis=0),
    )


def test_hidden_states_are_those_of_an_unrolled_loop(decoder, tokens, packed_whole):
    _, states = packed_whole
    assert len(states) == 5

    model = decoder.merge()
    meta = packing_metadata((2, T))
    blocks = []
    for block in model.layers:
        graphdef, stacked = nnx.split(block)
        blocks.append(
            (jax.jit(lambda s, x, g=graphdef: nnx.merge(g, s)(x, meta)[0]), stacked)
        )
    x = model.embed(tokens)
    seen = [x]
    for layer in range(4):
        run, stacked = blocks[layer % 2]
        x = run(
            jax.tree.map(lambda leaf, p=layer // 2: np.asarray(leaf)[p], stacked), x
        )
        seen.append(x)
    _same(states, (*seen[:-1], model.final_norm(x)))


@pytest.fixture(scope="module")
def short(tokens):
    """Tokens and segments of two rows with two and three documents."""
    ids = np.repeat([[1, 2, 0], [1, 2, 3]], [9, 9, 6], axis=1)
    return tokens[:, :24], jnp.asarray(ids, jnp.int32)


@pytest.fixture(scope="module")
def mixture(short):
    """tokens -> (reports of the layers, of the prediction head, its logits)."""
    graphdef, state = _parts(
        _config(
            pattern=("attention", "sliding_attention"),
            sliding_attention=AttentionConfig(
                num_heads=2, num_kv_heads=2, head_dim=6, rope=None, window=4, sinks=True
            ),
            mlp=MOE,
            num_mtp_layers=1,
            tie_embeddings=True,
        )
    )
    # Layer l is made to want expert l.
    for position in (0, 1):
        bias = state["layers"][position]["mlp"]["router"]["bias"]
        bias[...] = 100.0 * jnp.eye(4)[position::2]

    @jax.jit
    def run(tokens):
        model = nnx.merge(graphdef, state)
        out = model(tokens, short[1])
        hidden, aux = model.mtp_hidden(out.hidden, tokens, short[1])
        return out.aux, aux, model.unembed(hidden)

    return run


def test_reports_come_in_the_order_of_the_layers(mixture, short):
    aux, mtp_aux, _ = mixture(short[0])
    real = int((short[1] > 0).sum())
    np.testing.assert_array_equal(aux.counts.sum(1), [2 * real] * 4)
    np.testing.assert_array_equal(np.diag(aux.counts), [real] * 4)
    assert aux.max_violation.shape == (4,)
    # Each document's last token has no successor for the prediction head to read.
    assert int(mtp_aux.counts.sum()) == 2 * (real - 5)


def test_prediction_head_reads_no_other_document(mixture, short):
    tokens, segments = short
    logits = np.asarray(mixture(tokens)[2])
    assert logits.shape == (2, 23, VOCAB)
    # Index 8 is the first document's last token, where nothing can be predicted.
    other = jnp.where(segments == 2, (tokens + 1) % VOCAB, tokens)
    second = np.asarray(mixture(other)[2])
    np.testing.assert_array_equal(logits[:, :8], second[:, :8])
    assert np.abs(logits[:, 9:17] - second[:, 9:17]).max() > 1e-2
    # Inside a document the successor is read, and nothing after it.
    last = np.asarray(mixture(tokens.at[:, 8].set((tokens[:, 8] + 1) % VOCAB))[2])
    changed = (logits != last).any(-1)
    assert changed[:, 7].all()
    assert not changed[:, :7].any()
    assert not changed[:, 9:].any()


@pytest.fixture(scope="module")
def gradients(short):
    """(policy, tables) -> gradients of a two-layer model with random parameters."""

    def compute(policy, *tables):
        graphdef, state = _parts(
            _config(pattern=("attention",), num_layers=2, remat_policy=policy)
        )

        @jax.jit
        @jax.grad
        def run(state):
            return jnp.mean(nnx.merge(graphdef, state)(*short).logits ** 2)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "packing_tables", lambda *sizes, cached: tables)
            return run(state)

    return compute


@pytest.fixture(scope="module")
def kept_whole(gradients):
    return gradients("none")


def test_every_parameter_of_every_layer_gets_a_gradient(kept_whole):
    for path, leaf in jax.tree_util.tree_leaves_with_path(kept_whole):
        norms = np.abs(np.asarray(leaf)).reshape(leaf.shape[0], -1).max(-1)
        if "layers" in jax.tree_util.keystr(path):
            assert (norms > 0).all(), path
        assert norms.max() > 0, path


@pytest.mark.parametrize(
    "policy",
    [
        *("full", "save_names:attention_out,mlp_up"),
        *("offload", "offload_policy:attention_out"),
    ],
)
def test_rematerialisation_changes_no_gradient(kept_whole, gradients, policy):
    # Tables for kernels pass through each policy as constants of its scan.
    tables = (
        AttentionTiles(window=None, block_q=128, block_kv=64),
        ChunkStarts(chunk=64),
    )
    _same(gradients(policy, *tables), kept_whole, atol=1e-4)


@pytest.mark.parametrize(("policy", "copies"), [("offload", 2), ("remat", 0)])
def test_each_layer_of_a_period_stores_its_input(short, policy, copies):
    config = _config(
        pattern=("attention", "sliding_attention"),
        sliding_attention=AttentionConfig(
            num_heads=2, num_kv_heads=1, head_dim=8, window=3
        ),
        num_layers=6,
        mlp=MOE,  # its reports hold integers, which have no gradient
        remat_policy=policy,
    )
    graphdef, state = _parts(config)

    def loss(state):
        output = nnx.merge(graphdef, state)(*short)
        return jnp.sum(output.aux.balance_loss), output.aux.counts

    traced = jax.jit(jax.grad(loss, has_aux=True)).trace(state)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"pinned_host"') == copies
    assert text.count('placement = "device"') == copies


def test_every_spelling_of_a_policy_is_read_back():
    for text in ("save", "remat", "offload", "offload_policy", "offload_group:2"):
        policy = RematPolicy.parse(text)
        again = RematPolicy.of_mode(policy.mode, group=policy.group)
        assert RematPolicy.parse(again) == policy
    policy = RematPolicy.parse("offload_policy:a,b")
    assert (policy.mode, policy.names) == ("policy", ("a", "b"))
    assert RematPolicy.of_mode("policy", names=policy.names) == "offload_policy:a,b"


def test_router_biases_are_no_parameters():
    model = nnx.eval_shape(lambda: Decoder(_config(mlp=MOE), rngs=nnx.Rngs(0)))
    _, _, rest = nnx.split(model, nnx.Param, ...)
    kinds = [type(value) for _, value in nnx.to_flat_state(rest)]
    assert kinds == [RouterBias] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_bf16_keeps_f32_where_it_must(tied):
    config = _config(
        mlp=MOE, dtype="bfloat16", param_dtype="bfloat16", tie_embeddings=tied
    )
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        keeps = any(word in name for word in ("A_log", "dt_bias", "router"))
        assert leaf.dtype == (jnp.float32 if keeps else jnp.bfloat16), name
    assert hasattr(abstract, "lm_head") != tied

    def forward(state, tokens):
        model = nnx.merge(graphdef, state)
        return model(tokens, cache=model.init_cache(2, T))

    out = jax.eval_shape(forward, state, jnp.zeros((2, 7), jnp.int32))
    assert out.logits.dtype == jnp.float32
    assert out.hidden.dtype == jnp.bfloat16
    assert out.cache.layers[0].state.dtype == jnp.float32
    assert out.cache.layers[1].k.dtype == jnp.bfloat16
    assert out.aux.balance_loss.dtype == jnp.float32


def test_initial_parameters_differ_by_period_and_keep_the_stream_small():
    config = _config(pattern=("attention",), num_layers=8, d_model=64)
    model = init_decoder(config, 3)
    kernel = np.asarray(model.layers[0].mixer.o_proj.kernel[...])
    assert kernel.shape == (8, 16, 64)
    assert np.abs(kernel[0] - kernel[1]).max() > 1e-3
    # fan-in 16, scaled by one over the root of twice eight layers.
    assert kernel.std() == pytest.approx(16**-0.5 / 4, rel=0.05)
    np.testing.assert_array_equal(model.final_norm.scale[...], 0.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_layers": 5}, "num_layers=5 must be a multiple"),
        ({"pattern": ("mamba3",)}, "names 'mamba3'"),
        ({"pattern": ()}, r"pattern=\(\)"),
        ({"pattern": ("sliding_attention",)}, "`sliding_attention` must"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"param_dtype": "fp8"}, "param_dtype='fp8'"),
        ({"remat_policy": "some"}, "remat_policy='some'"),
        ({"remat_policy": "save_names:"}, "remat_policy='save_names:'"),
        ({"remat_policy": "save_names"}, "remat_policy='save_names'"),
        ({"remat_policy": "full:2"}, "remat_policy='full:2'"),
        ({"remat_policy": "offload:2"}, "remat_policy='offload:2'"),
        ({"remat_policy": "offload_policy:a,"}, "remat_policy='offload_policy:a,'"),
        ({"remat_policy": "offload_group"}, "remat_policy='offload_group'"),
        ({"remat_policy": "offload_group:3"}, "must divide the 2 periods"),
        ({"num_mtp_layers": 2}, "num_mtp_layers=2"),
        (
            {"pattern": ("gdn",), "attention": None, "num_mtp_layers": 1},
            "needs `attention`",
        ),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"norm_eps": -1.0}, r"norm_eps=-1\.0"),
        ({"implementation": "cuda"}, "'cuda' is unknown"),
    ],
)
def test_bad_configs_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        _config(**changes)


def test_bad_inputs_raise(decoder):
    model = decoder.merge()
    with pytest.raises(ValueError, match="must be \\[B, T\\]"):
        model(jnp.zeros((3,), jnp.int32))
    with pytest.raises(ValueError, match="segment_ids has shape"):
        model(jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 4), jnp.int32))
    with pytest.raises(ValueError, match="cache has 3 rows, tokens have 2"):
        model(jnp.zeros((2, 1), jnp.int32), cache=model.init_cache(3, 4))
    with pytest.raises(ValueError, match="T=5, more than the 4 slots"):
        model(jnp.zeros((2, 5), jnp.int32), cache=model.init_cache(2, 4))
    for ids in ([0, 1, 2, 2], [1, 0, 0, 1]):
        with pytest.raises(ValueError, match=r"segments\[1\] holds 2 documents"):
            model(
                jnp.zeros((2, 4), jnp.int32),
                np.array([[0, 3, 3, 0], ids], np.int32),
                cache=model.init_cache(2, 4),
            )
    with pytest.raises(ValueError, match="no MTP head"):
        model.mtp_logits(jnp.zeros((1, 2, 12)), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="token id -1"):
        model(np.array([[0, -1]], np.int32))


def test_configs_can_key_a_compilation_cache():
    assert hash(_config(implementation={"attention": "xla"})) == hash(
        _config(implementation={"attention": "xla"})
    )
    assert _config().layer_types == ("gdn", "attention") * 2

"""What layers read of a packing is built once, outside the scan over them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.data.batch import (
    AttentionTiles,
    ChunkStarts,
    ConvBorders,
    packing_metadata,
)
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder
from jaxaccel.nn.attention import Attention, AttentionConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from jaxaccel.nn.mlp import MLPConfig
from pallas_kernels._common import hw
from pallas_kernels.attention import mosaic as attention_kernels
from pallas_kernels.attention import tiling
from pallas_kernels.causal_conv1d import mosaic as conv_kernels
from pallas_kernels.gated_delta_rule import mosaic as rule_kernels


B, T = 2, 128
WINDOW = 9
KERNELS = {op: "mosaic" for op in ("attention", "causal_conv1d", "gated_delta_rule")}
HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}

GDN = GatedDeltaNetConfig(num_key_heads=1, num_value_heads=2, key_dim=64, value_dim=64)

# What an array depends on: nothing, the packing alone, or tokens and parameters too.
CONSTANT, PACKING, DATA = range(3)
LAUNCHES = ("pallas_call", "mpmd_map")
# Moves integers and computes none.
LAYOUT = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "pad"),
    *("reshape", "slice", "squeeze", "stack", "transpose"),
}


def inner_jaxprs(equation):
    """The programs inside an equation, those of kernels apart."""
    if equation.primitive.name in LAUNCHES:
        return []
    leaves = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")
    )
    jaxprs = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]


def is_literal(variable):
    return hasattr(variable, "val")


def live_equations(jaxpr):
    """The equations whose results somebody reads, in their order."""
    needed = {v for v in jaxpr.outvars if not is_literal(v)}
    live = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(v in needed for v in equation.outvars):
            needed |= {v for v in equation.invars if not is_literal(v)}
            live.append(equation)
    return live[::-1]


def derivations(jaxpr, kinds, scope="", in_layers=False):
    """Integers that are computed from the packing alone within a scan over layers.

    Args:
      jaxpr: the program.
      kinds: what each of its inputs depends on.
      scope: where it stands in the model.
      in_layers: whether it is a part of such a scan.

    Returns:
      What the outputs depend on; "primitive scope" of each such equation.
    """
    kind_of = dict(zip(jaxpr.invars, kinds, strict=True))
    found = []

    def kind(variable):
        return CONSTANT if is_literal(variable) else kind_of.get(variable, CONSTANT)

    for equation in live_equations(jaxpr):
        inputs = [kind(v) for v in equation.invars]
        depends = max(inputs, default=CONSTANT)
        outputs = [depends] * len(equation.outvars)
        name = equation.primitive.name
        here = f"{scope}/{equation.source_info.name_stack}"
        inner = inner_jaxprs(equation)
        # A scan over the packing alone is a part of a search, not of the model.
        inside = in_layers or (name == "scan" and depends == DATA)
        for program in inner:
            # Branches come without their index; what else splits its inputs is no
            # layer, and each part is taken to read all of them.
            given = inputs[len(inputs) - len(program.invars) :]
            if len(given) != len(program.invars):
                given = [depends] * len(program.invars)
            results, more = derivations(program, given, here, inside)
            found += more
            if len(results) == len(outputs):
                outputs = results
        computes = in_layers and not inner and name not in LAYOUT
        if computes and depends == PACKING and any(map(is_table, equation.outvars)):
            found.append(f"{name} {here}")
        kind_of.update(zip(equation.outvars, outputs, strict=True))
    return [kind(v) for v in jaxpr.outvars], found


def is_table(variable):
    """Whether it holds more integers than the indices of a convolution's state."""
    integer = not jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    return integer and variable.aval.size > B * (GDN.conv_width - 1)


def count(jaxpr, *primitives):
    inner = [p for equation in jaxpr.eqns for p in inner_jaxprs(equation)]
    own = sum(equation.primitive.name in primitives for equation in jaxpr.eqns)
    return own + sum(count(program, *primitives) for program in inner)


def config(**changes):
    settings = {
        "vocab_size": 29,
        "d_model": 16,
        "num_layers": 8,
        "pattern": ("gdn", "attention", "sliding_attention", "attention"),
        "attention": AttentionConfig(**HEADS),
        "sliding_attention": AttentionConfig(**HEADS, window=WINDOW, sinks=True),
        "gdn": GDN,
        "mlp": MLPConfig(d_ff=16),
        "dtype": "bfloat16",
        "implementation": KERNELS,
    }
    return DecoderConfig(**(settings | changes))


def abstract_decoder(config):
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def traced(policy, *, gradient):
    """The program of a decoder's forward pass, or of its gradient, never run."""
    graphdef, state = nnx.split(abstract_decoder(config(remat_policy=policy)))

    def loss(state, tokens, segments, positions):
        model = nnx.merge(graphdef, state)
        return jnp.sum(model(tokens, segments, positions).hidden.astype(jnp.float32))

    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    with hw.assume():
        made = jax.make_jaxpr(jax.grad(loss) if gradient else loss)
        return made(state, ids, ids, ids).jaxpr


def derived_in_layers(jaxpr):
    kinds = [DATA] * (len(jaxpr.invars) - 2) + [PACKING] * 2
    return derivations(jaxpr, kinds)[1]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("policy", ["none", "full", "offload"])
def test_no_layer_derives_the_metadata_again(policy, gradient):
    jaxpr = traced(policy, gradient=gradient)
    assert derived_in_layers(jaxpr) == []
    # Two orders of blocks for each of two windows, though six layers read them.
    assert count(jaxpr, "sort") == 4
    # One for the convolution, two for the rule and one for each attention.
    assert count(jaxpr, *LAUNCHES) >= 6


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("mixer", "layers"),
    [
        (GatedDeltaNet, ["layer_0_gdn"]),
        (Attention, [f"layer_{i}" for i in (1, 2, 3)]),
    ],
)
def test_a_layer_that_derives_is_found(monkeypatch, mixer, layers, gradient):
    monkeypatch.setattr(mixer, "tables", lambda *sizes, cached=False: ())
    found = derived_in_layers(traced("full", gradient=gradient))
    assert all(any(layer in what for what in found) for layer in layers)
    assert all(any(layer in what for layer in layers) for what in found)
    assert any(what.startswith("cummax") for what in found)


def test_a_run_pays_for_what_its_implementations_read():
    named = abstract_decoder(config())
    tiles = [AttentionTiles(window=w, **tiling(64)) for w in (None, WINDOW)]
    starts, borders = ChunkStarts(chunk=64), ConvBorders(width=4)
    with hw.assume():
        assert named.packing_tables(B, T) == (starts, borders, *tiles)
        # Kernels read no cache of keys, and one token is a step.
        assert named.packing_tables(B, T, cached=True) == (starts,)
        assert named.packing_tables(B, 1, cached=True) == ()
        other = abstract_decoder(config(implementation=KERNELS | {"attention": "xla"}))
        assert other.packing_tables(B, T) == (starts, borders)
    plain = abstract_decoder(config(implementation=None))
    assert plain.packing_tables(B, T) == ()
    with pytest.raises(NotImplementedError, match="need a Hopper GPU"):
        named.packing_tables(B, T)


@pytest.mark.parametrize("kind", ["sliding_attention", "gdn"])
def test_kernels_read_the_same_with_and_without_tables(monkeypatch, kind):
    """What a kernel is given is all that it knows of the packing."""
    decoder = config(
        num_layers=1, pattern=(kind,), implementation=KERNELS, param_dtype="bfloat16"
    )
    module = abstract_decoder(decoder).layers[0].mixer
    graphdef, state = nnx.split(module)
    read = []

    def attend(q, k, v, *, bounds, **options):
        read.append(bounds)
        return q, q[..., 0].astype(jnp.float32)

    def rule(q, k, v, g, beta, *, starts, initial_state, **options):
        read.append(starts)
        return v, initial_state

    def convolve(kernels, x, weight, *, borders, initial_state, **options):
        read.append(borders)
        return x, initial_state

    monkeypatch.setattr(conv_kernels, "causal_conv1d", convolve)
    monkeypatch.setattr(attention_kernels, "attention", attend)
    monkeypatch.setattr(rule_kernels, "gated_delta_rule", rule)

    def tables(state, x, segments, positions):
        mixer = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state))
        pack = functools.partial(
            packing_metadata, (B, T), segment_ids=segments, positions=positions
        )
        read.clear()
        for names in (mixer.tables(B, T), ()):
            mixer(x, pack(tables=names))
        half = len(read) // 2
        return read[:half], read[half:]

    segments = np.repeat([[1, 2, 3, 0], [7, 2, 7, 1]], [60, 5, 40, 23], axis=1)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    x = jnp.zeros((B, T, 16), jnp.bfloat16)
    with hw.assume():
        given, derived = jax.jit(tables)(state, x, segments.astype(np.int32), None)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(derived), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(given) == jax.tree.structure(derived)
    # One block of keys has nothing before it in the list of pairs.
    several = [leaf for leaf in jax.tree.leaves(given) if leaf[0].size > 1]
    assert several
    assert all(len(np.unique(leaf)) > 1 for leaf in several)

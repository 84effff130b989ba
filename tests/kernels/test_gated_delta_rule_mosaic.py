"""Mosaic kernels of `gated_delta_rule`, interpreted, each against the recurrence."""

import dataclasses
import functools
import re
from typing import get_args

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from running import jit

from pallas_kernels import gated_delta_rule
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_rule import (
    choose,
    config_mosaic,
    entry_gradients,
    reference,
    summaries,
    tables,
)
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    HEAD_DIM,
    Config,
    Gate,
)


SCALE = HEAD_DIM**-0.5
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
# Relative errors against the recurrence in f32, as for the public kernels.
LIMITS = dict(zip(NAMES, (5e-3, 5e-3, 8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 8e-3), strict=True))


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def arguments(batch=1, time=CHUNK, group=1, dtype=jnp.bfloat16, decay=0.05, seed=0):
    """q, k, v, g, beta, initial state of one key head."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    q, k = normal(2, batch, time, 1, HEAD_DIM)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = normal(batch, time, group, HEAD_DIM)
    g = -np.float32(decay) * np.logaddexp(0, normal(batch, time, group) + 1)
    beta = 1 / (1 + np.exp(-normal(batch, time, group)))
    state = np.float32(0.3) * normal(batch, group, HEAD_DIM, HEAD_DIM)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return tuple(jnp.asarray(x) for x in (q, k, v, g, beta, state))


def first(batch, time, *starts):
    is_first = np.zeros((batch, time), bool)
    for row, token in starts:
        is_first[row, token] = True
    return jnp.asarray(is_first)


def exact(args):
    return tuple(x.astype(jnp.float32) for x in args)


def rule(args, is_first, implementation, config=None):
    *inputs, state = args
    return gated_delta_rule(
        *inputs,
        is_first=is_first,
        initial_state=state,
        config=config,
        implementation=implementation,
    )


# One program for each implementation and each set of shapes.
compiled_rule = jit(rule, static_argnums=(2, 3))


def cotangents(args):
    rng = np.random.default_rng(99)
    do, d_state = (rng.standard_normal(args[i].shape, np.float32) for i in (2, 5))
    return jnp.asarray(do.astype(args[2].dtype)), jnp.asarray(d_state)


@functools.partial(jit, static_argnums=(3, 4))
def gradients(args, is_first, cotangents, implementation, config=None):
    """o, final state and the six gradients."""
    out, pullback = jax.vjp(
        lambda *args: rule(args, is_first, implementation, config), *args
    )
    do, d_state = cotangents
    return *out, *pullback((do.astype(out[0].dtype), d_state))


def with_gradients(args, is_first, implementation):
    return gradients(args, is_first, cotangents(args), implementation)


def assert_all_close(got, want, names=NAMES):
    for name, a, b in zip(names, got, want, strict=True):
        assert_close(a, b, rel=LIMITS[name], name=name)


def shapes_of(args):
    return config_mosaic.shapes_of(args[0], args[2])


def flat(x):
    return x.reshape(-1, *x.shape[2:])


def prepared(args, is_first):
    """What `kernel_inverse.prepare` makes, token by token in float64."""
    _, k, _, g, beta, _ = (np.asarray(x, np.float64) for x in args)
    start = np.asarray(tables.document_starts(is_first, CHUNK))
    batch, time, heads = g.shape
    inverse = np.zeros((batch, time, heads, CHUNK))
    gates = np.zeros((batch, heads, time // CHUNK, len(Gate), CHUNK))
    for row, head, chunk in np.ndindex(batch, heads, time // CHUNK):
        at = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        keys, decay, begin = k[row, at, 0], g[row, at, head], start[row, at]
        lower = np.tril(beta[row, at, head, None] * (keys @ keys.T), -1)
        inverse[row, at, head] = np.linalg.inv(np.eye(CHUNK) + lower)
        total = [decay[begin[i] + 1 : i + 1].sum() for i in range(CHUNK)]
        left = [decay[i + 1 :].sum() for i in range(CHUNK)]
        table = gates[row, head, chunk]
        table[Gate.TOTAL] = np.array(total) / np.log(2)
        table[Gate.ENTER] = np.where(begin < 0, np.exp(total), 0)
        table[Gate.LEAVE] = np.where(begin == begin[-1], np.exp(left), 0)
        table[Gate.BETA] = beta[row, at, head]
        table[Gate.START] = begin
    return (
        jnp.asarray(inverse, args[1].dtype).reshape(-1, heads, CHUNK),
        jnp.asarray(flat(gates), jnp.float32),
    )


def sources(args, is_first, **more):
    q, k, v = (flat(x) for x in args[:3])
    inverse, gates = prepared(args, is_first)
    named = {"q": q, "k": k, "v": v, "inverse": inverse, "gates": gates}
    return named | more


def suffix(args, is_first, begin):
    """(o, final state) of the tokens from `begin` on as a function of the state."""

    def run(state):
        tail = (x[:, begin:] for x in exact(args[:5]))
        return reference.gated_delta_rule(
            *tail, is_first=is_first[:, begin:], initial_state=state, scale=SCALE
        )

    return run


@jit
def states_between(args, is_first):
    """The state at each chunk's entry, and its gradient at each chunk's exit."""
    time = args[0].shape[1]
    do, d_last = cotangents(args)
    states, d_states = [], []
    for begin in range(0, time, CHUNK):
        head = (x[:, :begin] for x in exact(args[:5]))
        states.append(
            reference.gated_delta_rule(
                *head,
                is_first=is_first[:, :begin],
                initial_state=args[5],
                scale=SCALE,
            )[1]
        )
        end = begin + CHUNK
        if end == time:
            d_states.append(d_last)
        else:
            pullback = jax.vjp(suffix(args, is_first, end), args[5])[1]
            d_states += pullback((do[:, end:].astype(jnp.float32), d_last))
    return tuple(flat(jnp.stack(x, axis=2)) for x in (states, d_states))


DOCUMENTS = ((0, 5), (0, CHUNK + 30), (0, CHUNK + 31))


@pytest.fixture(scope="module")
def documents():
    """Two chunks, two value heads, documents that begin inside both chunks."""
    args = arguments(time=2 * CHUNK, group=2)
    return args, first(1, 2 * CHUNK, *DOCUMENTS)


@pytest.fixture(scope="module")
def forgetful(documents):
    """The same, but the second head forgets fast and some tokens write nothing.

    Returns:
      Arguments, first tokens, and what the recurrence makes of them.
    """
    args, is_first = documents
    decay = jnp.array([1, 16 / 0.05], jnp.float32)[None, None]
    beta = args[4].at[:, 7::9].set(0)
    args = (*args[:3], args[3] * decay, beta, args[5])
    return args, is_first, with_gradients(exact(args), is_first, "reference")


@pytest.mark.parametrize("warpgroups", [1, 5])
def test_chunks_are_inverted_whatever_the_keys(warpgroups):
    from pallas_kernels.gated_delta_rule import kernel_inverse

    # Chunk 0 has random keys, chunk 1 keys of cosine 0.9, chunk 2 one key.
    q, k, v, g, beta, state = arguments(time=3 * CHUNK)
    exact_k = k.astype(jnp.float32)
    alike = unit(exact_k / 2 + exact_k[:, :1])
    k = jnp.concatenate([k[:, :CHUNK], alike.astype(k.dtype)[:, CHUNK:]], axis=1)
    k = k.at[:, 2 * CHUNK :].set(k[:, :1])
    beta = beta.at[:, CHUNK:].set(0.98)
    args = (q, k, v, g, beta, state)
    is_first = first(1, 3 * CHUNK, *DOCUMENTS)

    def by_head(x):
        return jnp.swapaxes(x, 1, 2)[:, 0]

    config = Config(prepare_warpgroups=warpgroups)
    with interpreted():
        inverse, gates = jit(
            functools.partial(kernel_inverse.prepare, shapes_of(args), config)
        )(
            flat(k),
            by_head(g * kernel_inverse.LOG2_E),
            by_head(beta),
            tables.document_starts(is_first, CHUNK),
        )
    want_inverse, want_gates = prepared(args, is_first)
    error = inverse.astype(jnp.float32) - want_inverse.astype(jnp.float32)
    assert float(jnp.abs(error).max()) < 6e-3
    assert float(jnp.abs(gates - want_gates).max()) < 1e-5


@pytest.mark.parametrize(
    "dtype, time, group", [("bfloat16", 100, 2), ("float16", 64, 3)]
)
def test_forward_is_the_recurrence(dtype, time, group):
    args = arguments(time=time, group=group, dtype=jnp.dtype(dtype))
    is_first = first(1, time, (0, 5), (0, time - 3))
    with interpreted():
        got = compiled_rule(args, is_first, "mosaic")
    want = compiled_rule(exact(args), is_first, "reference")
    assert_all_close(got, want, NAMES[:2])


@pytest.mark.parametrize("stages", [2, 3])
def test_places_of_the_forward_ring_are_used_again(stages):
    args = arguments(time=(stages + 1) * CHUNK)
    is_first = first(1, (stages + 1) * CHUNK, (0, 5))
    with interpreted():
        got = compiled_rule(args, is_first, "mosaic", Config(segments=1, stages=stages))
    want = compiled_rule(exact(args), is_first, "reference")
    assert_all_close(got, want, NAMES[:2])


def test_places_of_the_backward_ring_are_used_again():
    from pallas_kernels.gated_delta_rule import kernel_bwd

    args = arguments(time=3 * CHUNK)
    is_first = first(1, 3 * CHUNK, (0, 70))
    do, d_last = cotangents(args)
    inputs = sources(args, is_first, do=flat(do))
    blocks = Config(grads="blocks")
    with interpreted():
        between, d_initial = jit(
            functools.partial(kernel_bwd.chunk_bwd, shapes_of(args), SCALE, blocks)
        )(inputs, flat(args[5]), flat(d_last))
    want = with_gradients(exact(args), is_first, "reference")
    assert_close(between["dv"].reshape(want[4].shape), want[4], rel=8e-3, name="dv")
    assert_close(d_initial.reshape(want[7].shape), want[7], rel=8e-3, name="dinitial")


def test_states_and_their_gradients_run_through_the_chunks(documents):
    from pallas_kernels.gated_delta_rule import kernel_bwd

    args, is_first = documents
    do, d_last = cotangents(args)
    inputs = sources(args, is_first, do=flat(do))
    blocks = Config(grads="blocks")
    with interpreted():
        between, d_initial = jit(
            functools.partial(kernel_bwd.chunk_bwd, shapes_of(args), SCALE, blocks)
        )(inputs, flat(args[5]), flat(d_last))
    states, dv, d_states = (between[x] for x in ("states", "dv", "d_states"))
    want = with_gradients(exact(args), is_first, "reference")
    want_states, want_d_states = states_between(args, is_first)
    assert_close(states, want_states, rel=5e-3, block_axes=(0, 1), name="states")
    assert_close(d_states, want_d_states, rel=8e-3, name="d_states")
    assert_close(dv.reshape(want[4].shape), want[4], rel=8e-3, name="dv")
    assert_close(d_initial.reshape(want[7].shape), want[7], rel=8e-3, name="dinitial")


@pytest.mark.parametrize(
    "config",
    [
        Config(grads="blocks"),
        Config(grads="blocks", grads_products="together"),
        Config(grads="blocks", grads_warpgroups=3),
        Config(),
    ],
    ids=["in_turn", "together", "three", "ring"],
)
def test_all_gradients_are_those_of_the_recurrence(forgetful, config):
    """One SM, so that the only block of a ring takes one chunk after the other."""
    from pallas_kernels.gated_delta_rule import mosaic

    args, is_first, want = forgetful
    inverse, gates = prepared(args, is_first)
    saved = (*args[:4], inverse, gates, flat(args[5]), None)
    backward = functools.partial(mosaic._rule_backward, shapes_of(args), SCALE, config)
    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        *grads, none, d_initial = jit(backward)(saved, cotangents(args))
    assert none is None  # for the document starts
    assert_all_close((*grads, d_initial), want[2:], NAMES[2:])
    # The second value head's gates alone: its gradients are the smaller ones.
    for i in (5, 6):
        got = grads[i - 2][:, :, 1]
        assert_all_close([got], [want[i][:, :, 1]], [NAMES[i]])


def test_gradients_have_the_shapes_and_dtypes_of_their_inputs():
    args = jax.eval_shape(lambda: arguments(batch=2, time=100, group=3))

    def loss(*args):
        o, state = rule(args, None, "mosaic")
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    with hw.assume():
        grads = jax.eval_shape(jax.grad(loss, argnums=range(6)), *args)
    for grad, arg in zip(grads, args, strict=True):
        assert (grad.shape, grad.dtype) == (arg.shape, arg.dtype)


@pytest.mark.parametrize("names", [(), ("gdn_inverse", "gdn_gates")])
def test_rematerialisation_policies_find_the_inverses(names, capsys):
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(*args):
        return jnp.sum(rule(args, None, "mosaic")[1])

    with hw.assume():
        jax.ad_checkpoint.print_saved_residuals(loss, *arguments())
    shown = capsys.readouterr().out
    for name in ("gdn_inverse", "gdn_gates"):
        assert (f"named '{name}'" in shown) == (name in names), shown


def test_a_document_is_bit_equal_wherever_it_stands():
    # Row 0 has two documents, row 1 the second of them and then padding.
    args = arguments(batch=2, time=2 * CHUNK, decay=0.001)
    moved = [x.at[1, :CHUNK].set(x[0, CHUNK:]) for x in args[:5]]
    for i in (3, 4):
        moved[i] = moved[i].at[1, CHUNK:].set(0)
    is_first = first(2, 2 * CHUNK, (0, CHUNK), (1, 0))
    with interpreted():
        o, state = jit(rule, static_argnums=2)((*moved, args[5]), is_first, "mosaic")
    np.testing.assert_array_equal(o[0, CHUNK:], o[1, :CHUNK])
    np.testing.assert_array_equal(state[0], state[1])


def test_total_decay_leaves_finite_results():
    args = arguments(time=100, group=2)
    args = (*args[:3], args[3].at[:, 1::7].set(-1e4), *args[4:])
    with interpreted():
        got = compiled_rule(args, first(1, 100), "mosaic")
    want = compiled_rule(exact(args), first(1, 100), "reference")
    assert_all_close(got, want, NAMES[:2])


def test_segments_side_by_side_are_the_recurrence():
    """The middle one has both ends, the last one starts a document and is padded."""
    config = Config(segments=3, stages=3, order="values_first")
    args = arguments(time=2 * CHUNK + 10, decay=0.005, dtype=jnp.float16)
    is_first = first(1, 2 * CHUNK + 10, (0, 2 * CHUNK + 5))
    do, d_state = cotangents(args)

    def run(*args):
        return rule(args, is_first, "mosaic", config)

    with interpreted():
        # The interpreter runs one kernel at a time, so forward and backward apart.
        out, pullback = jax.vjp(jax.jit(run), *args)
        jax.block_until_ready(out)
        grads = jit(lambda pullback, *d: pullback(d))(pullback, do, d_state)
    want = with_gradients(exact(args), is_first, "reference")
    assert_all_close((*out, *grads), want)


def test_rows_are_summarised_for_other_devices(monkeypatch):
    from pallas_kernels.gated_delta_rule import mosaic

    args = arguments(time=CHUNK - 7, decay=0.005)
    is_first = first(1, CHUNK - 7)
    do, _ = cotangents(args)
    padded = [jnp.pad(x, ((0, 0), (0, 7), *((0, 0),) * (x.ndim - 2))) for x in args[:5]]
    known = prepared((*padded, args[5]), first(1, CHUNK))
    monkeypatch.setattr(mosaic, "_prepare", lambda *args: known)

    def passes(q, k, v, g, beta, do, implementation):
        rest = {"is_first": is_first, "implementation": implementation}
        through, written = summaries(k, v, g, beta, **rest)
        # One after the other: the interpreter runs one kernel at a time.
        q, written = jax.lax.optimization_barrier((q, written))
        entry = entry_gradients(q, k, g, beta, do, scale=SCALE, **rest)
        return through, written, entry

    with interpreted():
        got = jit(passes, static_argnums=6)(*args[:5], do, "mosaic")
    want = passes(*exact(args[:5]), do.astype(jnp.float32), "xla")
    for a, b, name in zip(got, want, ("through", "written", "entry"), strict=True):
        # A row of a map does not depend on its others, and its error is of as many
        # roundings of its own: within twice what the whole one may have.
        assert_close(a, b, rel=5e-3, block_rel=1e-2, block_axes=(0, 1, 2), name=name)


def test_without_a_card_the_kernels_refuse_and_nothing_picks_them():
    args = arguments()
    with pytest.raises(NotImplementedError, match="Hopper"):
        rule(args, first(1, CHUNK), "mosaic")
    assert choose(*args[:5]).implementation == "xla"
    with hw.assume():
        assert choose(*args[:5]).implementation == "mosaic"
        assert choose(*exact(args[:5])).implementation == "xla"
        narrow = [x[..., :64] for x in args[:2]]
        choice = choose(*narrow, *args[2:5])
        assert choice.implementation == "xla"
        assert "no measured row" in choice.refused["mosaic"]


@pytest.mark.parametrize(
    "group, config",
    [
        (4, Config(segments=1, prepare_warpgroups=5)),
        (2, Config(segments=3, stages=3, order="values_first")),
    ],
)
def test_kernels_lower_for_the_card(group, config):
    args = jax.eval_shape(lambda: arguments(batch=2, time=3 * CHUNK, group=group))
    with hw.assume():
        lowered = (
            jit(lambda *args: rule(args, None, "mosaic", config))
            .trace(*args)
            .lower(lowering_platforms=("cuda",))
        )
    text = lowered.as_text()
    assert "pk_gdn_prepare" in text
    assert "pk_gdn_fwd" in text
    assert ("pk_gdn_summary" in text) == (config.segments > 1)


@pytest.mark.parametrize("kernel", ["grads", "grads_ring", "entry_gradients"])
def test_gradient_kernels_lower_for_the_card(kernel):
    from pallas_kernels.gated_delta_rule import (
        kernel_grads,
        kernel_grads_ring,
        kernel_summary,
    )

    args = jax.eval_shape(lambda: arguments(time=2 * CHUNK, group=2))
    shapes = shapes_of(args)

    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    time, items, chunks = 2 * CHUNK, 2, 2
    keys, values = like(time, 1, HEAD_DIM), like(time, 2, HEAD_DIM)
    states = like(items, chunks, HEAD_DIM, HEAD_DIM)
    state = like(items, HEAD_DIM, HEAD_DIM, dtype=jnp.float32)
    inputs = {"q": keys, "k": keys, "v": values, "do": values}
    inputs["inverse"] = like(time, 2, CHUNK)
    inputs["gates"] = like(items, chunks, len(Gate), CHUNK, dtype=jnp.float32)
    if kernel == "entry_gradients":
        shapes = dataclasses.replace(shapes, batch=2, time=CHUNK, segments=2)
        fn = functools.partial(kernel_summary.entry_gradients, shapes, SCALE)
        inputs["gates"] = like(2 * items, 1, len(Gate), CHUNK, dtype=jnp.float32)
        del inputs["v"]
        operands = (inputs, state)
    elif kernel == "grads_ring":
        fn = functools.partial(kernel_grads_ring.chunk_grads_ring, shapes, SCALE)
        del inputs["inverse"]
        more = dict.fromkeys(("written", "d_weighed"), values)
        more |= dict.fromkeys(("states", "d_states"), states)
        operands = (inputs | more,)
    else:
        config = Config(grads_warpgroups=3)
        fn = functools.partial(kernel_grads.chunk_grads, shapes, SCALE, config)
        more = {"dv": values, "states": states, "d_states": states}
        operands = (inputs | more,)
    with hw.assume():
        traced = jit(fn).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"pk_gdn_{kernel}" in text


def test_layers_of_equal_sizes_share_their_kernels():
    args = jax.eval_shape(lambda: arguments(time=2 * CHUNK, group=2))

    def three_layers(q, k, v, *rest):
        for _ in range(3):
            v, _ = rule((q, k, v, *rest), None, "mosaic")
        return jnp.sum(v.astype(jnp.float32))

    with hw.assume():
        traced = jit(jax.grad(three_layers, argnums=range(6))).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Forward and backward of three layers: one kernel each, called from everywhere.
    for name in ("prepare", "chunk_fwd", "chunk_bwd", "chunk_grads_ring"):
        assert text.count(f"func.func private @{name}(") == 1
        assert f"func.func private @{name}_" not in text
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 4
    for name in ("prepare", "fwd", "bwd", "grads_ring"):
        assert f"pk_gdn_{name}" in text


def model_arguments(batch, time, dtype=jnp.bfloat16):
    """Sixteen key heads, thirty-two value heads."""
    keys = jax.random.split(jax.random.key(3), 16)
    make = functools.partial(arguments, batch, time, 2, dtype)
    parts = [make(seed=int(i)) for i in range(len(keys))]
    heads = [jnp.concatenate(x, axis=2) for x in list(zip(*parts, strict=True))[:5]]
    return *heads, jnp.concatenate([x[5] for x in parts], axis=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "batch, time, dtype, config",
    [
        (1, 1000, "bfloat16", Config(segments=1)),
        (3, 512, "float16", Config(segments=1)),
        (1, 1000, "float16", Config(segments=4, stages=3, order="values_first")),
        (3, 512, "bfloat16", Config(grads="blocks", stages=2)),
        (1, 1000, "float16", Config(segments=4, prepare_warpgroups=5)),
    ],
)
def test_model_shapes_on_the_card(batch, time, dtype, config):
    args = model_arguments(batch, time, jnp.dtype(dtype))
    starts = [(row, t) for row in range(batch) for t in (0, 130, 192, 400)]
    is_first = first(batch, time, *starts)
    run = functools.partial(
        gradients, args, is_first, cotangents(args), "mosaic", config
    )
    got = run()
    assert_all_close(got, with_gradients(exact(args), is_first, "reference"))
    for _ in range(100):
        for name, a, b in zip(NAMES, run(), got, strict=True):
            assert bool(jnp.array_equal(a, b)), name


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3, 4])
def test_rings_of_other_groups_on_the_card(group):
    """More chunks than there are SMs, so that blocks take several in turn."""
    parts = [arguments(4, 512, group, seed=i) for i in range(8)]
    heads = (jnp.concatenate(x, axis=2) for x in list(zip(*parts, strict=True))[:5])
    args = (*heads, jnp.concatenate([x[5] for x in parts], axis=1))
    is_first = first(4, 512, *((row, t) for row in range(4) for t in (0, 130, 192)))
    alone = Config(segments=1)
    got = gradients(args, is_first, cotangents(args), "mosaic", alone)
    assert_all_close(got, with_gradients(exact(args), is_first, "reference"))


@pytest.mark.gpu
def test_long_rows_on_the_card():
    """Against the chunked form: the recurrence would keep a state for every token."""
    args = model_arguments(1, 4096)
    is_first = first(1, 4096, *((0, t) for t in (0, 130, 192, 400)))
    planned = Config(segments=None)
    got = gradients(args, is_first, cotangents(args), "mosaic", planned)
    assert_all_close(got, with_gradients(exact(args), is_first, "xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("order", get_args(config_mosaic.Order))
def test_variants_of_the_forward_on_the_card(order):
    args = model_arguments(1, 1000)
    is_first = first(1, 1000, (0, 130), (0, 192))
    run = jit(
        lambda args, config: rule(args, is_first, "mosaic", config), static_argnums=1
    )
    got = run(args, Config(order=order))
    assert_all_close(got, rule(exact(args), is_first, "reference"), NAMES[:2])
    # How many chunks wait in shared memory changes nothing.
    other = run(args, Config(order=order, stages=2))
    for a, b in zip(other, got, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_documents_that_no_border_cuts_have_the_same_bits():
    args = model_arguments(1, 1024)
    is_first = first(1, 1024, *((0, t) for t in (0, 64, 256, 512, 700, 768)))
    whole, split = (
        gradients(args, is_first, cotangents(args), "mosaic", Config(segments=count))
        for count in (1, 4)
    )
    for name, a, b in zip(NAMES, whole, split, strict=True):
        assert bool(jnp.array_equal(a, b)), name


@pytest.mark.gpu
@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (64, 256)])
def test_other_head_dims_on_the_card(key_dim, value_dim):
    q, k, v, g, beta, state = model_arguments(1, 300)
    q, k = (unit(x[..., :key_dim].astype(jnp.float32)).astype(q.dtype) for x in (q, k))
    v, state = (jnp.tile(x, (1, 1, *y)) for x, y in ((v, (1, 2)), (state, (2, 1))))
    args = (q, k, v[..., :value_dim], g, beta, state[:, :, :value_dim, :key_dim])
    is_first = first(1, 300, (0, 130), (0, 192))
    got = with_gradients(args, is_first, "mosaic")
    assert_all_close(got, with_gradients(exact(args), is_first, "reference"))

"""Mosaic kernels of `gated_delta_rule`, interpreted, each against the recurrence."""

import dataclasses
import functools
import re

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import (
    NAMES,
    SCALE,
    arguments,
    assert_all_close,
    compiled_rule,
    cotangents,
    exact,
    first,
    flat,
    rule,
    shapes_of,
    unit,
    with_gradients,
)
from running import jit

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_rule import (
    choose,
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


def test_chunks_are_inverted_whatever_the_keys():
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

    with interpreted():
        inverse, gates = jax.jit(
            functools.partial(kernel_inverse.prepare, shapes_of(args))
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
    with interpreted():
        between, d_initial = jit(
            functools.partial(kernel_bwd.chunk_bwd, shapes_of(args), SCALE)
        )(inputs, flat(args[5]), flat(d_last))
    want = with_gradients(exact(args), is_first, "reference")
    d_weighed = between["d_weighed"].astype(jnp.float32).reshape(want[4].shape)
    dv = d_weighed * args[4][..., None]
    assert_close(dv, want[4], rel=8e-3, name="dv")
    assert_close(d_initial.reshape(want[7].shape), want[7], rel=8e-3, name="dinitial")


@pytest.fixture(scope="module")
def chunks_backward(documents):
    """What one kernel computes again and hands to that of the gradients."""
    from pallas_kernels.gated_delta_rule import kernel_bwd

    args, is_first = documents
    do, d_last = cotangents(args)
    inputs = sources(args, is_first, do=flat(do))
    with interpreted():
        return jit(functools.partial(kernel_bwd.chunk_bwd, shapes_of(args), SCALE))(
            inputs, flat(args[5]), flat(d_last)
        )


def test_states_and_their_gradients_run_through_the_chunks(documents, chunks_backward):
    args, is_first = documents
    between, _ = chunks_backward
    states, d_states = states_between(args, is_first)
    assert_close(between["states"], states, rel=5e-3, block_axes=(0, 1), name="states")
    assert_close(between["d_states"], d_states, rel=8e-3, name="d_states")


@pytest.mark.parametrize("grads", ["ring", "stream"])
def test_all_gradients_are_those_of_the_recurrence(forgetful, grads):
    """One SM, so that the only block of a ring takes one chunk after the other."""
    from pallas_kernels.gated_delta_rule import mosaic

    args, is_first, want = forgetful
    inverse, gates = prepared(args, is_first)
    saved = (*args[:4], inverse, gates, flat(args[5]), None, {})
    config = Config(grads=grads)
    backward = functools.partial(mosaic._rule_backward, shapes_of(args), SCALE, config)
    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        *found, none, d_initial = jit(backward)(saved, cotangents(args))
    assert none is None  # for the document starts
    assert_all_close((*found, d_initial), want[2:], NAMES[2:])
    # The second value head's gates alone: its gradients are the smaller ones.
    for i in (5, 6):
        got = found[i - 2][:, :, 1]
        assert_all_close([got], [want[i][:, :, 1]], [NAMES[i]])


def test_the_forward_keeps_what_the_backward_would_compute(documents, chunks_backward):
    from pallas_kernels.gated_delta_rule import kernel_bwd, kernel_fwd

    args, is_first = documents
    shapes, state = shapes_of(args), flat(args[5])
    do, d_last = cotangents(args)
    inputs = sources(args, is_first)
    reverse = {x: inputs[x] for x in ("q", "k", "inverse", "gates")} | {"do": flat(do)}
    keep = Config(keep="states")
    with interpreted():
        *_, states, written = kernel_fwd.chunk_fwd(
            shapes, SCALE, keep, inputs, state, kept=True
        )
        jax.block_until_ready(written)
        got = kernel_bwd.reverse_bwd(shapes, SCALE, reverse, flat(d_last))
        jax.block_until_ready(got)
    want, d_initial = chunks_backward
    np.testing.assert_array_equal(got[1], d_initial)
    between = got[0] | {"states": states, "written": written}
    assert between.keys() == want.keys()
    for name, array in between.items():
        np.testing.assert_array_equal(array, want[name], err_msg=name)


def test_what_the_forward_keeps_serves_the_gradient(monkeypatch):
    """More chunks than stages, the last one padded, documents of a token and of two."""
    from pallas_kernels.gated_delta_rule import mosaic

    config = Config(segments=1, keep="states")
    args = arguments(time=3 * CHUNK - 10, decay=0.005)
    is_first = first(1, 3 * CHUNK - 10, *DOCUMENTS, (0, CHUNK + 33), (0, 2 * CHUNK))

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, 10), *((0, 0),) * (x.ndim - 2)))

    known = prepared((*map(padded, args[:5]), args[5]), padded(is_first))
    monkeypatch.setattr(mosaic, "_prepare", lambda *args: known)

    def run(*args):
        return rule(args, is_first, "mosaic", config)

    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        # The interpreter runs one kernel at a time, so forward and backward apart.
        out, pullback = jax.vjp(jax.jit(run), *args)
        jax.block_until_ready(out)
        grads = jit(lambda pullback, *d: pullback(d))(pullback, *cotangents(args))
    want = with_gradients(exact(args), is_first, "reference")
    assert_all_close((*out, *grads), want)


def test_gradients_have_the_shapes_and_dtypes_of_their_inputs():
    args = jax.eval_shape(lambda: arguments(batch=2, time=100, group=3))

    def loss(*args):
        o, state = rule(args, None, "mosaic")
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    with hw.assume():
        grads = jax.eval_shape(jax.grad(loss, argnums=range(6)), *args)
    for grad, arg in zip(grads, args, strict=True):
        assert (grad.shape, grad.dtype) == (arg.shape, arg.dtype)


@pytest.mark.parametrize("names", [(), ("gdn_inverse", "gdn_gates"), ("gdn_states",)])
def test_rematerialisation_policies_find_what_is_kept(names, capsys):
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(*args):
        return jnp.sum(rule(args, None, "mosaic", Config(keep="states"))[1])

    with hw.assume():
        jax.ad_checkpoint.print_saved_residuals(loss, *arguments())
    shown = capsys.readouterr().out
    for name in ("gdn_inverse", "gdn_gates", "gdn_states"):
        assert (f"named '{name}'" in shown) == (name in names), shown


def test_a_document_is_bit_equal_wherever_it_stands():
    # Row 0 has two documents, row 1 the second of them and then padding.
    args = arguments(batch=2, time=2 * CHUNK, decay=0.001)
    moved = [x.at[1, :CHUNK].set(x[0, CHUNK:]) for x in args[:5]]
    for i in (3, 4):
        moved[i] = moved[i].at[1, CHUNK:].set(0)
    is_first = first(2, 2 * CHUNK, (0, CHUNK), (1, 0))
    with interpreted():
        o, state = compiled_rule((*moved, args[5]), is_first, "mosaic")
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
        (4, Config(segments=1)),
        (2, Config(segments=3, order="values_first")),
        (2, Config(segments=3, keep="states")),
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


@pytest.mark.parametrize("kernel", ["grads_ring", "grads_stream", "entry_gradients"])
def test_gradient_kernels_lower_for_the_card(kernel):
    from pallas_kernels.gated_delta_rule import (
        kernel_grads_ring,
        kernel_grads_stream,
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
    else:
        run = {
            "grads_ring": kernel_grads_ring.chunk_grads_ring,
            "grads_stream": kernel_grads_stream.chunk_grads_stream,
        }[kernel]
        fn = functools.partial(run, shapes, SCALE)
        del inputs["inverse"]
        more = dict.fromkeys(("written", "d_weighed"), values)
        more |= dict.fromkeys(("states", "d_states"), states)
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
    for name in ("prepare", "chunk_fwd", "chunk_bwd", "chunk_grads_stream"):
        assert text.count(f"func.func private @{name}(") == 1
        assert f"func.func private @{name}_" not in text
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 4
    for name in ("prepare", "fwd", "bwd", "grads_stream"):
        assert f"pk_gdn_{name}" in text

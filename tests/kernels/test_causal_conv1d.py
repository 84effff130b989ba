"""`causal_conv1d`: the shifted sums against the loop over tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.testing import assert_close
from pallas_kernels.causal_conv1d import causal_conv1d, document_borders, specs


CI = {spec.name: spec for spec in specs.specs("ci")}
NAMES = ("y", "state", "dx", "dweight", "dbias", "dstate")

# Compiling is most of what these tests would do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
conv = jit(functools.partial(causal_conv1d, implementation="xla", activation="silu"))


def inputs(time, batch=1, dim=3, width=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, time, dim), np.float32)
    return x, rng.standard_normal((width, dim), np.float32)


def by_hand(x, weight):
    """One document in float64, zeros in front."""
    width = weight.shape[0]
    padded = np.pad(x.astype(np.float64), ((0, 0), (width - 1, 0), (0, 0)))
    z = sum(padded[:, w : w + x.shape[1]] * weight[w] for w in range(width))
    return z / (1 + np.exp(-z))


@pytest.mark.parametrize("name", CI)
def test_shifted_sums_equal_the_loop_with_all_gradients(name):
    spec = CI[name]
    args = jit(spec.arguments)(jax.random.key(0))
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    ops = [
        functools.partial(causal_conv1d, implementation=i) for i in ("xla", "reference")
    ]
    steps = [specs.run(spec, op, backward=True) for op in ops]
    got, want = jit(lambda a, b: (steps[0](*a), steps[1](*b)))(args, exact)
    for label, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, name=label)


@pytest.mark.parametrize("time", [1, 2, 3, 9])
def test_equals_float64(time):
    x, weight = inputs(time, batch=2)
    y, state = conv(x, weight)
    assert_close(y, by_hand(x, weight), rel=1e-6)
    padded = np.pad(x, ((0, 0), (3, 0), (0, 0)))
    np.testing.assert_array_equal(state, padded[:, -3:])


def test_packed_documents_equal_separate_ones_bit_for_bit():
    lengths = (5, 1, 2, 7)
    starts = np.cumsum((0, *lengths[:-1]))
    x, weight = inputs(sum(lengths))
    first = np.isin(np.arange(sum(lengths)), starts)[None]
    # The sums alone: exp of a vector's last elements is rounded in another way.
    op = jit(functools.partial(causal_conv1d, implementation="xla"))
    y, state = op(x, weight, is_first=first)
    for start, length in zip(starts, lengths, strict=True):
        alone, final = op(x[:, start : start + length], weight)
        np.testing.assert_array_equal(y[:, start : start + length], alone)
    np.testing.assert_array_equal(state, final)


def test_no_gradient_crosses_a_border():
    x, weight = inputs(9)
    first = np.isin(np.arange(9), (0, 5))[None]

    def one(x, state):
        y, _ = causal_conv1d(
            x, weight, is_first=first, initial_state=state, implementation="xla"
        )
        return jnp.sum(y[:, 6])

    dx, d_state = jit(jax.grad(one, (0, 1)))(x, np.ones((1, 3, 3), np.float32))
    assert np.all(np.asarray(dx)[:, [5, 6]])
    assert not np.any(np.asarray(dx)[:, [0, 1, 2, 3, 4, 7, 8]])
    assert not np.any(d_state)


@pytest.mark.parametrize("split", [1, 2, 3, 7])
def test_a_sequence_may_be_cut_anywhere(split):
    x, weight = inputs(9)
    y, state = conv(x, weight)
    head, middle = conv(x[:, :split], weight)
    tail, final = conv(x[:, split:], weight, initial_state=middle)
    assert_close(np.concatenate([head, tail], axis=1), y, rel=1e-6)
    np.testing.assert_array_equal(final, state)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_state_skips_padding_and_older_documents(implementation):
    op = jit(functools.partial(causal_conv1d, implementation=implementation))
    x, weight = inputs(6, batch=5)
    before = np.full((5, 3, 3), 7.0, np.float32)
    first = np.zeros((5, 6), bool)
    real = np.arange(6)[None] < np.array([[6], [4], [1], [0], [5]])
    first[4, 3] = first[0, 2] = True
    _, state = op(x, weight, is_first=first, is_real=real, initial_state=before)
    np.testing.assert_array_equal(state[0], x[0, 3:6])
    np.testing.assert_array_equal(state[1], x[1, 1:4])
    np.testing.assert_array_equal(state[2], [*before[2, :2], x[2, 0]])
    np.testing.assert_array_equal(state[3], before[3])
    np.testing.assert_array_equal(state[4], [0 * x[4, 0], *x[4, 3:5]])


def test_a_document_of_padding_alone_leaves_zeros():
    """The last document counts even if none of its tokens does."""
    x, weight = inputs(4)
    first, real = (np.arange(4) == 2)[None], (np.arange(4) < 2)[None]
    for implementation in ("reference", "xla"):
        op = jit(functools.partial(causal_conv1d, implementation=implementation))
        _, state = op(x, weight, is_first=first, is_real=real)
        assert not np.any(state)


def test_gradients_pass_through_padding():
    x, weight = inputs(5)
    state = np.ones((1, 3, 3), np.float32)
    real = np.array([[True, False, True, False, False]])

    @functools.partial(jit, static_argnums=0)
    def pulled(implementation, x, state):
        op = functools.partial(causal_conv1d, implementation=implementation)
        _, pull = jax.vjp(
            lambda *a: op(a[0], weight, is_real=real, initial_state=a[1]), x, state
        )
        return pull((x, state))

    got, want = (pulled(name, x, state) for name in ("xla", "reference"))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_left_padding_before_a_document_leaves_no_trace():
    x, weight = inputs(6)
    real = (np.arange(6) >= 4)[None]
    y, state = conv(x, weight, is_first=(np.arange(6) == 4)[None], is_real=real)
    alone, final = conv(x[:, 4:], weight)
    assert_close(y[:, 4:], alone, rel=1e-6)
    np.testing.assert_array_equal(state, final)


def test_width_one_has_an_empty_state():
    x, weight = inputs(4, width=1)
    y, state = conv(x, weight, is_real=np.ones((1, 4), bool))
    assert_close(y, by_hand(x, weight), rel=1e-6)
    assert state.shape == (1, 0, 3)


def test_backward_keeps_no_float32_copy():
    """bf16 x is kept as it is; what is f32 is computed again."""
    x, weight = inputs(8, dim=5)
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    op = functools.partial(causal_conv1d, implementation="xla", activation="silu")
    pull = jax.eval_shape(lambda *a: jax.vjp(op, *a)[1], x, weight)
    kept = [a for a in jax.tree.leaves(pull) if a.dtype == jnp.float32]
    assert not [a.shape for a in kept if a.size >= x.size]


@pytest.mark.parametrize("backward", [False, True])
def test_lowers_for_cuda(backward):
    spec = next(specs.specs("perf"))
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(causal_conv1d, implementation="xla")
    run = jax.jit(specs.run(spec, op, backward))
    run.trace(*shapes).lower(lowering_platforms=("cuda",))


def test_errors_name_the_value():
    x, weight = inputs(4)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 2\)"):
        causal_conv1d(x, weight[:, :2])
    with pytest.raises(ValueError, match="activation is 'relu'"):
        causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match=r"initial_state has shape \(1, 2, 3\)"):
        causal_conv1d(x, weight, initial_state=x[:, :2])
    with pytest.raises(ValueError, match="is_first has dtype int32, expected bool"):
        causal_conv1d(x, weight, is_first=np.zeros((1, 4), np.int32))
    borders = document_borders(None, None, batch=1, time=5, width=4)
    with pytest.raises(ValueError, match=r"built for .* = \[1, 3, 5\], .* \[1, 3, 4\]"):
        causal_conv1d(x, weight, borders=borders)

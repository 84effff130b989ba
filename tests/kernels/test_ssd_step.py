"""Decoding with Mamba-2: every form against the recurrence and the layer's ops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv1d, rms_norm, ssd, ssd_step
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.ssd_step import api, choose, config, specs
from pallas_kernels.ssd_step.config import Config


CI = {spec.name: spec for spec in specs.specs("ci")}
SMALL = CI["ci_small"]
KERNEL = CI["ci_kernel_float32"]
NAMES = ("y", "conv_pool", "state_pool")
POOLS = slice(4, 6)


def arguments(spec, seed=0):
    """As `spec.arguments`, without a program that draws them."""
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    scales = (1, 1, 1, None, 1, 0.3, 0.5, 0.5, 0.5, 1, 1, 1)
    return tuple(
        jnp.asarray(spec.slots)
        if scale is None
        else jnp.asarray(scale * draw.normal(size=x.shape), x.dtype)
        for x, scale in zip(shapes, scales, strict=True)
    )


def step(spec, args, implementation, **options):
    op = functools.partial(ssd_step, implementation=implementation, **options)
    return jax.jit(specs.run(spec, op))(*args)


def assert_results(got, want, rel=None):
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, rel=rel, name=name)


def by_hand(spec, args):
    """y, windows and states of the rows, one head at a time in float64."""
    xbc, dt, z, slots, conv, state, *layer = (np.asarray(m, np.float64) for m in args)
    weight, bias, A_log, D, dt_bias, scale = layer
    V, N, group = spec.head_dim, spec.state, spec.heads // spec.groups
    y, conv, state = np.zeros_like(z), conv.copy(), state.copy()
    for row, slot in enumerate(slots.astype(int)):
        if slot < 0:
            continue
        window = np.concatenate([conv[slot], xbc[row][None]])
        total = (window * weight).sum(0) + bias
        channels = total / (1 + np.exp(-total))
        conv[slot] = window[1:]
        for h in range(spec.heads):
            at = spec.heads * V + h // group * N
            x, b = channels[h * V : (h + 1) * V], channels[at : at + N]
            c = channels[at + spec.groups * N :][:N]
            s = np.log1p(np.exp(dt[row, h] + dt_bias[h]))
            decayed = np.exp(-np.exp(A_log[h]) * s) * state[slot, h]
            state[slot, h] = decayed + s * np.outer(x, b)
            y[row, h * V : (h + 1) * V] = state[slot, h] @ c + D[h] * x
        u = (y[row] * z[row] / (1 + np.exp(-z[row]))).reshape(spec.groups, -1)
        u = u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-5)
        y[row] = u.reshape(-1) * scale
    return y, conv, state


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_step_is_the_recurrence(implementation):
    args = arguments(SMALL)
    assert_results(step(SMALL, args, implementation), by_hand(SMALL, args))


def test_a_step_is_what_the_ops_of_a_layer_compute():
    """Convolution, recurrence and norm of whole sequences, with a limit on steps."""
    spec = dataclasses.replace(KERNEL, spare=0, skipped=False)
    args = arguments(spec, 1)
    args = (*args[:3], jnp.arange(spec.batch, dtype=jnp.int32), *args[4:])

    def both(xbc, dt, z, _, conv, state, *parameters):
        layer = dataclasses.replace(spec.layer(*parameters), dt_limit=(0.05, 1.0))
        got = ssd_step(xbc, dt, z, layer, conv, state, implementation="xla")
        channels, window = causal_conv1d(
            xbc[:, None],
            layer.conv_weight,
            bias=layer.conv_bias,
            initial_state=conv,
            activation="silu",
        )
        wide = spec.heads * spec.head_dim
        x, b, c = jnp.split(channels, (wide, wide + spec.groups * spec.state), axis=-1)
        y, last = ssd(
            x.reshape(*x.shape[:2], spec.heads, spec.head_dim),
            dt[:, None],
            -jnp.exp(layer.A_log),
            *(m.reshape(*m.shape[:2], spec.groups, spec.state) for m in (b, c)),
            d=layer.D,
            dt_bias=layer.dt_bias,
            dt_limit=layer.dt_limit,
            initial_state=state,
            implementation="reference",
        )
        y = rms_norm(
            y.reshape(z.shape),
            layer.norm_scale,
            eps=layer.norm_eps,
            gate=z,
            norm_before_gate=False,
            num_groups=spec.groups,
        )
        return got, (y, window, last)

    assert_results(*jax.jit(both)(*args))


def test_skipped_rows_move_no_bit():
    args = arguments(SMALL, 3)
    outside = jnp.array([0, 1, 3])  # slots that no row names
    pools = [m.at[outside].set(jnp.nan) for m in args[POOLS]]
    args = (*args[:4], *pools, *args[6:])
    y, *after = step(SMALL, args, "xla")
    for old, new in zip(pools, after, strict=True):
        np.testing.assert_array_equal(old[outside], new[outside])
        assert np.isfinite(np.asarray(new)[[2, 4]]).all()
    assert not np.any(y[1])
    assert np.all(np.any(np.asarray(y)[[0, 2]], axis=-1))


@pytest.mark.parametrize("name", ["ci_kernel_float32", "ci_kernel_bfloat16"])
def test_the_kernel_is_the_recurrence(name):
    """One SM: items in turn, a skipped row among them, and documents that begin."""
    spec = CI[name]
    args = arguments(spec, 4)
    stale = [m.at[int(spec.slots[2])].set(jnp.nan) for m in args[POOLS]]
    first = jnp.array([False, False, True])
    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        got = step(spec, (*args[:4], *stale, *args[6:]), "mosaic", is_first=first)
    assert_results(got, step(spec, args, "reference", is_first=first))


def test_another_tiling_is_the_recurrence():
    args = arguments(KERNEL, 5)
    tiling = Config(warpgroups=1, stages=3, part=16, row_threads=16, auto_barriers=True)
    with interpreted():
        got = step(KERNEL, args, "mosaic", config=tiling)
    assert_results(got, step(KERNEL, args, "reference"))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_the_kernel_lowers_for_the_card(state_dtype):
    spec = next(
        x for x in specs.specs("perf") if (x.batch, x.state_dtype) == (64, state_dtype)
    )
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    run = specs.run(spec, functools.partial(ssd_step, implementation="mosaic"))
    with hw.assume():
        lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",))
    assert "pk_ssd_step" in lowered.as_text()


def test_limits_are_named_and_many_heads_pick_the_kernel():
    def chosen(spec, **options):
        args = jax.eval_shape(spec.arguments, jax.random.key(0))
        run = specs.run(spec, functools.partial(choose, **options))
        return run(*args)

    mosaic = functools.partial(chosen, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="Hopper"):
        mosaic(KERNEL)
    assert chosen(KERNEL).implementation == "xla"
    with hw.assume():
        assert mosaic(KERNEL).config == config.heuristic(
            group=4, dtype=jnp.bfloat16, state_dtype=jnp.float32
        )
        many = dataclasses.replace(KERNEL, batch=512 // KERNEL.heads)
        assert chosen(many).implementation == "mosaic"
        assert "XLA is as fast" in chosen(KERNEL).refused["mosaic"]
        with pytest.raises(NotImplementedError, match="V = 8, N = 16"):
            mosaic(SMALL)
        with pytest.raises(NotImplementedError, match="3 heads read each group"):
            mosaic(dataclasses.replace(KERNEL, heads=6))
        with pytest.raises(NotImplementedError, match="W = 9 taps"):
            mosaic(dataclasses.replace(KERNEL, width=9))
        with pytest.raises(NotImplementedError, match="dtype = float16"):
            mosaic(dataclasses.replace(KERNEL, dtype="float16"))
        with pytest.raises(NotImplementedError, match="bytes of shared memory"):
            mosaic(KERNEL, config=Config(stages=6))
        with pytest.raises(NotImplementedError, match="warpgroups=2"):
            mosaic(dataclasses.replace(KERNEL, heads=4), config=Config())
    with pytest.raises(ValueError, match="stages=1"):
        Config(stages=1)


@pytest.mark.parametrize(
    "index, change, message",
    [
        (0, lambda m: m[:, 1:], "xbc has shape"),
        (1, lambda m: m.astype(jnp.bfloat16), "dt has dtype bfloat16"),
        (2, lambda m: m[:, 1:], "z has shape"),
        (3, lambda m: np.array([4, 4, 2], np.int32), "slot 4 is named by 2 rows"),
        (4, lambda m: m[:, 1:], "conv_pool has shape"),
        (5, lambda m: m.astype(jnp.float16), "state_pool has dtype float16"),
        (6, lambda m: m[:1], "expected \\[W, C\\] with W >= 2"),
        (9, lambda m: m[1:], "D has shape"),
    ],
)
def test_errors_name_the_value(index, change, message):
    args = list(arguments(SMALL))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        specs.run(SMALL, ssd_step)(*args)


def test_the_benchmark_measures_the_sizes_of_a_model():
    case = next(x for x in specs.bench_cases("perf") if " B64 " in x.workload)
    assert case.workload == "nemotron3_nano B64 H64 G8 V64 N128 float32 state"
    # The state alone, in and out.
    assert case.bytes > 64 * 2 * 64 * 64 * 128 * 4
    assert case.picked() == "xla"
    args = jax.eval_shape(case.arguments, jax.random.key(0))
    y, *pools = jax.eval_shape(case.reference, *args)
    assert y.shape == (64, 4096)
    assert [m.shape for m in pools] == [m.shape for m in args[POOLS]]
    assert api.STATE_DTYPES == ("float32", "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("spec", list(specs.specs("model")), ids=str)
def test_model_shapes_on_the_card(spec):
    args = spec.arguments(jax.random.key(0))
    want = step(spec, args, "reference")
    for tiling in (None, *specs.VARIANTS.values()):
        op = functools.partial(ssd_step, implementation="mosaic", config=tiling)
        run = jax.jit(specs.run(spec, op))
        got = run(*args)
        assert_results(got, want, rel=5e-3)
        for _ in range(20):
            for a, b in zip(run(*args), got, strict=True):
                assert bool(jnp.array_equal(a, b))

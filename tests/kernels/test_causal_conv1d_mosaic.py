"""`causal_conv1d` as Hopper kernels: in the interpreter, lowered, and on the card."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.causal_conv1d import api, causal_conv1d, config, specs, tables


Config = config.Config

MODEL = {spec.name: spec for spec in specs.specs("model")}
NAMES = ("y", "state", "dx", "dweight", "dbias", "dstate")

# Compiling is most of what these tests would do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

PLAIN = Config(time=4, channels=256, rows=2)
RING = dataclasses.replace(PLAIN, stages=2, branch=True)
SIDE_BY_SIDE = Config(time=3, channels=256, rows=1, stages=2, warpgroups=2)


def inputs(batch, time, dim, width, dtype="float32", seed=0):
    """x, weight, bias, state, dy, d_state."""
    rng = np.random.default_rng(seed)
    kept = (batch, width - 1, dim)
    shapes = ((batch, time, dim), (width, dim), (dim,), kept, (batch, time, dim), kept)
    return tuple(jnp.asarray(rng.standard_normal(s, np.float32), dtype) for s in shapes)


def at(batch, time, *places):
    """bool[batch, time], true at the (row, token) of `places`."""
    found = np.zeros((batch, time), bool)
    for place in places:
        found[place] = True
    return found


def gradients(implementation, *, bias=True, activation="silu", **options):
    """A function of `inputs` that gives what `NAMES` says, without dbias if no bias."""

    def op(x, weight, offset, state):
        return causal_conv1d(
            x,
            weight,
            bias=offset if bias else None,
            initial_state=state,
            activation=activation,
            implementation=implementation,
            **options,
        )

    def run(x, weight, offset, state, dy, d_state):
        results, pull = jax.vjp(op, x, weight, offset, state)
        return (*results, *pull((dy, d_state)))

    return run


@pytest.fixture
def tiled(monkeypatch):
    """Fixes the tiling of both kernels."""
    return lambda tiling: monkeypatch.setattr(config, "pick", lambda *_: tiling)


# Rows of 9 tokens and strips of 4: the last strip has one token, less than the taps
# reach, and no whole step.
DOCUMENTS = at(2, 9, (0, 0), (0, 3), (0, 4), (0, 5), (1, 2), (1, 8))
PADDED = ~at(2, 9, (0, 1), (0, 7), (1, 3), (1, 4), (1, 8))

CASES = {
    "packed, plain loads": (PLAIN, (2, 9, 256, 4), "float32", {"is_first": DOCUMENTS}),
    "packed and padded, ring, three taps": (
        RING,
        (2, 9, 256, 3),
        "bfloat16",
        {"is_first": DOCUMENTS, "is_real": PADDED, "bias": False},
    ),
    "two tiles side by side, two taps, no documents": (
        SIDE_BY_SIDE,
        (1, 5, 512, 2),
        "float32",
        {"is_real": ~at(1, 5, (0, 2), (0, 4)), "activation": None},
    ),
    "fewer tokens than taps": (
        PLAIN,
        (2, 2, 256, 4),
        "float16",
        {"is_first": at(2, 2, (1, 1)), "bias": False},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_the_shifted_sums(tiled, case):
    """Which equal the reference; their gradients compile faster."""
    tiling, shape, dtype, options = CASES[case]
    tiled(tiling)
    args = inputs(*shape, dtype=dtype)
    with interpreted():
        step = jit(gradients("mosaic", **options))
        got = step(*args)
        if shape[1] < shape[3]:  # the cheapest
            for a, b in zip(got, step(*args), strict=True):
                np.testing.assert_array_equal(a, b)
    exact = tuple(a.astype(jnp.float32) for a in args)
    want = jit(gradients("xla", **options))(*exact)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, name=name)


LENGTHS = (4, 1, 2, 3)  # of documents in one row, over strips of 4 tokens
STARTS = tuple(int(n) for n in np.cumsum((0, *LENGTHS[:-1])))
ROWS, TIME = 1 + len(LENGTHS), sum(LENGTHS)


def document(index):
    return slice(STARTS[index], STARTS[index] + LENGTHS[index])


@pytest.fixture(scope="module")
def rows():
    """(is_first, is_real, x, dy, state, d_state) -> what `NAMES` says, all [ROWS, ...].

    Compiled once. Whole numbers and no activation: their sums are exact, as this
    machine rounds the same sum in different ways in different loops.
    """
    weight = jnp.asarray([[1.0], [2.0], [3.0], [5.0]]) * jnp.ones((1, 256))

    def run(is_first, is_real, x, dy, state, d_state):
        options = {"is_first": is_first, "is_real": is_real, "activation": None}
        op = gradients("mosaic", **options)
        return op(x, weight, jnp.full((256,), 7.0), state, dy, d_state)

    kept = (ROWS, 3, 256)
    shapes = [jax.ShapeDtypeStruct((ROWS, TIME), bool)] * 2
    shapes += [jax.ShapeDtypeStruct((ROWS, TIME, 256), jnp.float32)] * 2
    shapes += [jax.ShapeDtypeStruct(kept, jnp.float32)] * 2
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(config, "pick", lambda *_: RING)
        compiled = jit(run).lower(*shapes).compile()

    def call(*args):
        with interpreted():
            return [np.asarray(a) for a in compiled(*args)]

    return call


def whole_numbers(seed=0):
    """x, dy, state, d_state of `rows`."""
    rng = np.random.default_rng(seed)
    shapes = ((ROWS, TIME, 256),) * 2 + ((ROWS, 3, 256),) * 2
    return [rng.integers(-9, 10, shape).astype(np.float32) for shape in shapes]


def test_packed_documents_equal_separate_ones_bit_for_bit(rows):
    # Row 0 is packed; in each other row a document lies at the front, others behind it.
    first = at(ROWS, TIME, *((0, start) for start in STARTS))
    real = np.ones((ROWS, TIME), bool)
    x, dy, state, d_state = whole_numbers()
    state[1:] = 0
    for i, length in enumerate(LENGTHS):
        x[1 + i, :length], dy[1 + i, :length] = x[0, document(i)], dy[0, document(i)]
        real[1 + i, length:] = False
        dy[1 + i, length:] = 0
    d_state[1:-1], d_state[-1] = 0, d_state[0]
    y, final, dx, _, _, d_initial = rows(first, real, x, dy, state, d_state)
    for i, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(y[0, document(i)], y[1 + i, :length])
        np.testing.assert_array_equal(dx[0, document(i)], dx[1 + i, :length])
    np.testing.assert_array_equal(final[0], final[-1])
    assert not d_initial[0].any()  # the row begins with a document


def test_a_document_of_nans_leaves_the_others_alone(rows):
    first = np.repeat(at(1, TIME, *((0, start) for start in STARTS)), ROWS, axis=0)
    x, dy, state, d_state = whole_numbers()
    x[:], dy[:], d_state[:] = x[:1], dy[:1], 0
    for i in range(len(LENGTHS)):
        x[1 + i, document(i)] = dy[1 + i, document(i)] = np.nan
    results = rows(first, np.ones_like(first), x, dy, state, d_state)
    for result in (results[0], results[2]):
        for i in range(len(LENGTHS)):
            bad = np.arange(TIME)[document(i)]
            assert np.isnan(result[1 + i, bad]).all()
            others = np.delete(np.arange(TIME), bad)
            np.testing.assert_array_equal(result[1 + i, others], result[0, others])


def test_a_gradient_reaches_back_over_the_taps_and_no_border(rows):
    first = np.repeat(at(1, TIME, (0, 4), (0, 5)), ROWS, axis=0)
    x, _, state, _ = whole_numbers()
    dy, d_state = np.zeros_like(x), np.zeros_like(state)
    wanted = {3: [0, 1, 2, 3], 1: [0, 1], 4: [4], 6: [5, 6], 9: [6, 7, 8, 9]}
    for row, token in enumerate(wanted):
        dy[row, token] = 1
    _, _, dx, _, _, d_initial = rows(first, np.ones_like(first), x, dy, state, d_state)
    for row, (token, want) in enumerate(wanted.items()):
        assert np.flatnonzero(dx[row].any(axis=1)).tolist() == want
        assert dx[row, want].all()
        # Token 1 sees two inputs in front of the row, the last two of the state.
        assert d_initial[row].any(axis=1).tolist() == [False] + [token == 1] * 2


def test_reach_is_what_the_borders_leave():
    rng = np.random.default_rng(0)
    first = rng.random((3, 37)) < 0.3
    words = np.asarray(tables.packed_reach(jnp.asarray(first)))
    assert words.shape == (3, 3)
    bits = words[:, :, None].view(np.uint32) >> (2 * np.arange(16, dtype=np.uint32))
    reach = (bits & 3).reshape(3, -1)
    for row, token in np.ndindex(first.shape):
        back = first[row, max(0, token - 2) : token + 1][::-1]
        assert reach[row, token] == (int(back.argmax()) if back.any() else 3)
    assert (reach[:, 37:] == 3).all()


@pytest.mark.parametrize("masked", [True, False])
def test_kept_inputs_are_those_of_the_recurrence(masked):
    rng = np.random.default_rng(1)
    batch, time = 64, 7
    first, real = rng.random((batch, time)) < 0.15, rng.random((batch, time)) < 0.5
    # Numbers that say where they come from: no two inputs are equal.
    inputs = np.arange(1, batch * (time + 3) + 1, dtype=np.float32)
    inputs = inputs.reshape(batch, time + 3, 1)
    want = inputs[:, :3].copy()
    for row, token in np.ndindex(batch, time):
        if masked and first[row, token]:
            want[row] = 0
        if not masked or real[row, token]:
            want[row] = [*want[row, 1:], inputs[row, 3 + token]]
    cotangent = rng.integers(1, 9, want.shape).astype(np.float32)

    @jit
    def run(x, state, cotangent):
        place = tables.last_inputs(
            jnp.asarray(first) if masked else None,
            jnp.asarray(real) if masked else None,
            batch=batch,
            time=time,
            kept=3,
        )
        kept, pull = jax.vjp(lambda *a: tables.take_inputs(*a, place), x, state)
        added = tables.add_at_inputs(x, state, place, cotangent)
        return kept, pull(cotangent), added

    x, state = inputs[:, 3:], inputs[:, :3]
    kept, pulled, added = run(x, state, cotangent)
    np.testing.assert_array_equal(kept, want)
    for total, start, part in zip(added, (x, state), pulled, strict=True):
        np.testing.assert_array_equal(total, start + part)


def lowered(spec):
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(causal_conv1d, implementation="mosaic")
    step = jax.jit(specs.run(spec, op, backward=True))
    with hw.assume():
        text = step.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return all(f"pk_causal_conv1d_{way}" in text for way in ("fwd", "bwd"))


# The longest row and one token; a bias is below.
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_next_decode"])
def test_lowers_for_the_card_as_the_heuristic_tiles_it(name):
    assert lowered(next(s for s in specs.specs("perf") if s.name == name))


TILINGS = (
    Config(time=64, channels=1024, rows=8),
    Config(time=32, channels=256, rows=16, warpgroups=8, stages=1),
)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_lowers_with_every_way_to_move_tokens(tiled, tiling):
    tiled(tiling)
    spec = next(specs.specs("perf"))
    assert lowered(dataclasses.replace(spec, time=8191, bias=True, width=3))


def test_shared_memory_holds_the_ring_and_its_barriers():
    most = Config(time=4, channels=256, rows=1, stages=16, warpgroups=8)
    for inputs_read in (1, 2):
        slots = inputs_read * most.stages * most.warpgroups
        rest = most.ring_bytes(inputs_read, jnp.bfloat16) - slots * 256 * 2
        assert rest >= 8 * most.stages * most.warpgroups
    assert PLAIN.ring_bytes(1, jnp.bfloat16) == 0


def test_every_candidate_fits_the_card():
    for direction, inputs_read in (("fwd", 1), ("bwd", 2)):
        candidates = config.CANDIDATES[direction]
        assert len(set(candidates)) == len(candidates)
        for tiling in candidates:
            hw.check_smem(tiling.ring_bytes(inputs_read, jnp.bfloat16))
            assert 8192 % (tiling.channels * tiling.warpgroups) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "batch, time, dim", [(1, 1, 256), (4, 8192, 8192), (3, 5, 768)]
)
def test_the_heuristic_covers_a_row_and_divides_the_channels(batch, time, dim, dtype):
    for direction, inputs_read in (("fwd", 1), ("bwd", 2)):
        tiling = config.heuristic(batch, time, dim, dtype, direction)
        assert dim % (tiling.channels * tiling.warpgroups) == 0
        hw.check_smem(tiling.ring_bytes(inputs_read, dtype))
        tiles = dim // (tiling.channels * tiling.warpgroups)
        blocks = batch * -(-time // tiling.time) * tiles
        if direction == "fwd" and time >= 8192:
            assert tiling.time == config.SHORT
        else:
            assert blocks * tiling.warpgroups <= 4 * hw.H200.sms


def shapes(dim=256, width=4, dtype="bfloat16", weight_dtype=None, time=8):
    return (
        jax.ShapeDtypeStruct((2, time, dim), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((width, dim), jnp.dtype(weight_dtype or dtype)),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"dim": 128}, "128 channels are no positive multiple of 256"),
        ({"width": 5}, "W=5 taps, the kernels take 2 to 4"),
        ({"width": 1}, "W=1 taps"),
        ({"dtype": "float64", "weight_dtype": "float32"}, "x.dtype=float64"),
        ({"weight_dtype": "float16"}, "weight.dtype=float16"),
        ({"time": 0}, "2 rows of 0 tokens"),
    ],
)
def test_what_the_kernel_cannot_do_is_said_and_runs_on_xla(call, message):
    with hw.assume(), jax.enable_x64(True):
        choice = api.choose(*shapes(**call))
        assert choice.implementation == "xla"
        assert message in choice.refused["mosaic"]
        with pytest.raises(NotImplementedError, match=message):
            api.choose(*shapes(**call), implementation="mosaic")


def test_few_tokens_run_the_kernel_only_by_name():
    with hw.assume():
        assert api.choose(*shapes(time=1024)).implementation == "mosaic"
        few = api.choose(*shapes(time=1023))
        assert few.implementation == "xla"
        assert "far from any measured row" in few.refused["mosaic"]
        named = api.choose(*shapes(time=1023), implementation="mosaic")
        assert isinstance(named.config, config.Kernels)
        assert "forward Config(" in str(named)


def test_without_a_hopper_the_kernel_is_refused():
    if hw.is_hopper():
        return
    with pytest.raises(NotImplementedError, match="Hopper"):
        api.choose(*shapes(), implementation="mosaic")


@pytest.mark.parametrize(
    "fields",
    [{"rows": 3}, {"channels": 128}, {"time": 6}, {"stages": 17}, {"warpgroups": 9}],
)
def test_impossible_tilings_are_refused(fields):
    with pytest.raises(ValueError, match="allowed are"):
        Config(**({"time": 8, "channels": 256, "rows": 4} | fields))


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (Config(time=64, channels=1024, rows=16, stages=16), "shared memory"),
        (Config(time=64, channels=1024, warpgroups=3), r"1024 \* 3"),
    ],
)
def test_a_tiling_that_does_not_fit_is_refused_before_the_launch(
    tiled, tiling, message
):
    tiled(tiling)
    with pytest.raises(ValueError, match=message):
        lowered(next(specs.specs("perf")))


def test_tuning_keeps_the_fastest_tiling_that_is_right(monkeypatch, capsys):
    from pallas_kernels.causal_conv1d import kernel, tune, xla

    right, wrong, refused = (
        dataclasses.replace(PLAIN, channels=n) for n in (256, 512, 1024)
    )
    monkeypatch.setattr(config, "heuristic", lambda *_: wrong)
    monkeypatch.setattr(config, "CANDIDATES", {"fwd": (refused, right)})

    def launch(plan, x, weight, state, bias, table):
        del table
        if plan.config == refused:
            raise ValueError("does not fit")
        y, _ = xla.causal_conv1d(
            x,
            weight,
            bias=bias,
            is_first=None,
            is_real=None,
            initial_state=state,
            activation="silu",
        )
        return y * (1.5 if plan.config == wrong else 1.0)

    monkeypatch.setattr(kernel, "causal_conv1d_fwd", launch)
    spec = specs.Spec(
        name="tiny", tag="ci", batch=1, time=4, dim=1024, documents=0, dtype="float32"
    )
    (entry,) = tune.tune(spec, ["fwd"]).values()
    assert entry.pop("ms") > 0
    assert Config(**entry) == right
    printed = capsys.readouterr().out
    assert "relative error" in printed
    assert "does not fit" in printed


@pytest.fixture(scope="module", params=MODEL)
def on_card(request):
    """A spec, its arguments and one compiled call with gradients."""
    spec = MODEL[request.param]
    op = functools.partial(causal_conv1d, implementation="mosaic")
    step = jax.jit(specs.run(spec, op, backward=True))
    return spec, jax.jit(spec.arguments)(jax.random.key(0)), step


@pytest.mark.gpu
def test_results_and_gradients_on_the_card(on_card):
    spec, args, step = on_card
    exact = tuple(
        a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a
        for a in args
    )
    op = functools.partial(causal_conv1d, implementation="reference")
    want = jax.jit(specs.run(spec, op, backward=True))(*exact)
    for name, a, b in zip(NAMES, step(*args), want, strict=True):
        assert_close(a, b, name=f"{spec.name} {name}")


@pytest.mark.gpu
def test_packed_documents_equal_separate_ones_bit_for_bit_on_the_card(on_card):
    spec, args, _ = on_card
    x, weight, bias, *_ = (a[:1] if a.ndim == 3 else a for a in args)
    lengths = (700, 1, 2, 3, spec.time - 706)
    starts = np.cumsum((0, *lengths[:-1]))
    borders = at(1, spec.time, *((0, int(start)) for start in starts))
    options = {"activation": "silu", "implementation": "mosaic"}

    @jax.jit
    def run(x, is_first):
        def op(x):
            return causal_conv1d(x, weight, bias=bias, is_first=is_first, **options)[0]

        y, pull = jax.vjp(op, x)
        return y, pull(y)[0]

    together = run(x, jnp.asarray(borders))
    for start, length in zip(starts, lengths, strict=True):
        document = jnp.zeros_like(x).at[:, :length].set(x[:, start : start + length])
        # A border behind the document, so that no gradient comes from the zeros.
        alone = run(document, jnp.asarray(at(1, spec.time, (0, length % spec.time))))
        for a, b in zip(together, alone, strict=True):
            assert bool(jnp.all(a[:, start : start + length] == b[:, :length]))


@pytest.mark.gpu
def test_a_hundred_runs_give_the_same_bits(on_card):
    _, args, step = on_card
    first = step(*args)
    same = jax.jit(
        lambda a, b: jnp.stack([jnp.all(x == y) for x, y in zip(a, b, strict=True)])
    )
    for _ in range(100):
        assert bool(same(first, step(*args)).all())

"""ShadowKV: what is chosen, what is computed again, what moves, and what does not."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import layer_text as lt
import numpy as np
import pytest

from jaxaccel.cache import low_rank, reference
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.layer_state import Tokens
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.nn.attention import Rotation
from jaxaccel.nn.rope import RopeConfig
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels.landmark_scores import config as landmarks


# Chunks of 4: at 40 tokens with 8 in the window, 8 chunks of which 2 are chosen.
POLICY = ShadowKVCacheConfig(
    budget=8,
    chunk=4,
    rank=6,
    num_outliers=2,
    num_sinks=1,
    generated_outliers=0,
    local_window=8,
    values="device",
    slots=3,
)
LENGTHS, COUNT = [40, 0, 23], 30
# Of the longest prompt: with the same width and count, tests share their programs.
WIDTH = 41
PLAIN = dataclasses.replace(lt.SPEC, rotate=None)


def keep(policy, lengths):
    def of(b, q, k, v, n):
        starts, outlier = reference.shadowkv_chunks(
            k,
            lengths[b],
            chunk=policy.chunk,
            local_window=policy.local_window,
            num_outliers=policy.num_outliers,
            num_sinks=policy.num_sinks,
        )
        return reference.shadowkv_keep(
            q[-1],
            k,
            starts,
            outlier,
            chunk=policy.chunk,
            chosen=policy.budget // policy.chunk,
            scale=lt.SPEC.scale,
        )

    return of


@pytest.fixture(scope="module")
def text():
    """Keys of rank 6, which the basis of a prompt of 6 tokens or more holds."""
    return lt.draw(length=72, rank=6)


@pytest.fixture(scope="module")
def result(text):
    return lt.run(POLICY, text, LENGTHS, COUNT, width=WIDTH)


@pytest.fixture(scope="module")
def whole():
    """A text of keys of full rank, and what dense attention reads of it."""
    text, lengths = lt.draw(length=72), [40, 9, 24]
    _, dense, _ = lt.run(DenseCacheConfig(), text, lengths, COUNT, width=WIDTH)
    return text, lengths, dense


def test_it_reads_what_the_definition_says(text, result):
    _, o, state = result
    expected = lt.expected(text, LENGTHS, COUNT, keep(POLICY, LENGTHS))
    np.testing.assert_allclose(o, expected, atol=2e-5)
    # Generated chunks left the ring, and were chosen among.
    np.testing.assert_array_equal(state.start, [60, 20, 40])
    np.testing.assert_allclose(state.energy, 1.0, atol=1e-6)
    np.testing.assert_array_equal(state.rank_used, [6, 6, 6])


@pytest.mark.parametrize("lengths", [[9, 10, 11], [12, 13, 16], [1, 41, 39]])
def test_it_does_so_around_the_borders_of_chunks_and_window(text, lengths):
    _, o, _ = lt.run(POLICY, text, lengths, COUNT, width=WIDTH)
    expected = lt.expected(text, lengths, COUNT, keep(POLICY, lengths))
    np.testing.assert_allclose(o, expected, atol=3e-5)


def test_what_was_never_written_is_never_read(text, result):
    _, o, _ = lt.run(POLICY, text, LENGTHS, COUNT, width=WIDTH, poison=True)
    np.testing.assert_array_equal(o, result[1])


def test_a_row_that_was_reset_is_a_new_one(text, result):
    """Its chunks get other numbers than those of a fresh cache."""
    cleared = lt.reset(result[2], [True, False, True])
    arrays, ones = tuple(text.__dict__.values()), jnp.ones((3,), bool)
    # As long as there are numbers left for chunks.
    count = (cleared.first.shape[1] - int(cleared.next_chunk)) * 4
    assert 0 < count < COUNT
    o, after = lt.steps(POLICY, lt.SPEC, COUNT, arrays, cleared.length, cleared, ones)
    _, fresh, _ = lt.run(POLICY, text, [0, 41, 0], COUNT, width=WIDTH)
    np.testing.assert_array_equal(after.length, [COUNT, 30 + COUNT, COUNT])
    np.testing.assert_allclose(o[:count, ::2], fresh[:count, ::2], atol=2e-5)


def test_values_on_the_host_are_the_same(text, result):
    policy = dataclasses.replace(POLICY, values="host")
    arrays = tuple(text.__dict__.values())
    state = policy.init(lt.SPEC, 3, 72, jnp.float32)
    host = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    state = dataclasses.replace(state, values=jax.device_put(state.values, host))
    lengths = jnp.asarray(LENGTHS, jnp.int32)

    @jax.jit
    def prefill(state, arrays, lengths):
        where = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), (3, WIDTH))
        tokens = lt.take(*arrays, where, where < lengths[:, None])
        return policy.prefill(state, tokens, lt.SPEC)

    state = prefill(state, arrays, lengths)
    assert state.values.sharding.memory_kind == "pinned_host"
    real = jnp.ones((3,), bool)
    o, state = lt.steps(policy, lt.SPEC, COUNT, arrays, lengths, state, real)
    assert state.values.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(o, result[1])
    np.testing.assert_array_equal(state.misses, result[2].misses)


def test_slots_hold_the_values_of_their_chunks(result):
    state = result[2]
    state = jax.tree.map(np.asarray, state)
    held = state.slot_chunk
    assert (held >= 0).any()
    for b, g, m in np.argwhere(held >= 0):
        np.testing.assert_array_equal(
            state.v_slot[b, g, m], state.values[b, g, held[b, g, m]]
        )
    asked = np.asarray(state.hits + state.misses)
    # Two kv heads ask for two chunks at each step, once there are two.
    assert asked[0] == COUNT * 2 * 2
    assert 0 < state.misses[0] < asked[0]


def test_what_it_counts_is_told_for_each_layer(result):
    state = jax.tree.map(lambda x: np.stack([x, x]), result[2])
    cache = PolicyCache(states=(state,), policies=(POLICY,), ends=(2,))
    first, second = cache.counters()
    np.testing.assert_array_equal(first["misses"], second["misses"])
    # Two outliers of 4 tokens each, of prompts that had chunks.
    np.testing.assert_array_equal(first["outliers"], [2, 0, 2])
    np.testing.assert_allclose(first["outlier_share"], [8 / 70, 0, 8 / 53], rtol=1e-6)
    fetched = np.asarray(first["misses"]) * 4 * 8 * 4
    np.testing.assert_array_equal(first["fetched_bytes"], fetched)
    np.testing.assert_allclose(first["energy"], 1.0, atol=1e-6)


def test_the_whole_budget_at_full_rank_is_dense(whole):
    text, lengths, dense = whole
    policy = dataclasses.replace(
        POLICY, budget=72, rank=16, slots=None, num_outliers=3, prefill_budget=None
    )
    fewest = {"num_outliers": 0, "num_sinks": 0, "refresh_every": 3}
    many = {"slots": 18, "generated_outliers": 2, "refresh_every": 7}
    for changes in (many, fewest):
        changed = dataclasses.replace(policy, **changes)
        _, o, state = lt.run(changed, text, lengths, COUNT, width=WIDTH)
        # The prompt of 9 tokens spans 9 of the 16 dimensions; the rest is added.
        np.testing.assert_allclose(o, dense, atol=1e-5)
        np.testing.assert_allclose(state.energy, 1.0, atol=1e-6)
        np.testing.assert_array_equal(state.rank_used, 16)


def test_bfloat16_is_as_near_to_dense_as_its_rounding(whole):
    text, lengths, _ = whole
    text = text.astype(jnp.bfloat16)
    policy = dataclasses.replace(POLICY, budget=72, rank=16, slots=18)
    _, o, state = lt.run(policy, text, lengths, COUNT, width=WIDTH)
    exact = text.astype(jnp.float32)
    _, dense, _ = lt.run(DenseCacheConfig(), exact, lengths, COUNT, width=WIDTH)
    assert state.a.dtype == state.basis.dtype == state.values.dtype == jnp.bfloat16
    assert state.ring_residual.dtype == jnp.float32
    largest = np.abs(np.asarray(text.v, np.float32)).max()
    assert np.abs(o - dense).max() < 2.0**-7 * largest
    # Noise of rounding makes no directions: 16 there are, and none is missed.
    np.testing.assert_array_equal(state.rank_used, 16)
    assert (np.asarray(state.residual) < 0.02).all()


@pytest.mark.parametrize("length", [0, 7, 8])
def test_what_the_window_holds_is_dense(whole, length):
    text, lengths = whole[0], [length] * 3
    _, o, _ = lt.run(POLICY, text, lengths, COUNT, width=WIDTH)
    _, dense, _ = lt.run(DenseCacheConfig(), text, lengths, COUNT, width=WIDTH)
    # From 12 tokens on, the oldest are chosen or not.
    held = slice(0, 11 - length)
    assert np.abs(dense[held]).max() > 0
    np.testing.assert_allclose(o[held], dense[held], atol=2e-6)


def test_what_was_asked_before_changes_nothing(text):
    """The same tokens, after queries that chose other chunks."""
    rng = np.random.default_rng(3)
    before = rng.normal(size=text.q.shape).astype(np.float32) * 3
    last = WIDTH + COUNT - 1
    before[:, last] = text.q[:, last]
    other = dataclasses.replace(text, q=before)
    _, first, state = lt.run(POLICY, text, [WIDTH] * 3, COUNT)
    _, second, there = lt.run(POLICY, other, [WIDTH] * 3, COUNT)
    assert (np.asarray(state.slot_chunk) != np.asarray(there.slot_chunk)).any()
    assert (first[:-1] != second[:-1]).any()
    np.testing.assert_array_equal(first[-1], second[-1])


def test_a_schedule_keeps_to_its_choice_and_sees_new_tokens(text, result):
    every = dataclasses.replace(POLICY, refresh_every=3)
    _, o, _ = lt.run(every, text, LENGTHS, COUNT, width=WIDTH)
    plain = result[1]
    # At steps 0, 3, 6, ... the choice is fresh, and is what it would have been.
    np.testing.assert_allclose(o[::3], plain[::3], atol=2e-6)
    assert np.abs(o[1::3] - plain[1::3]).max() > 1e-2
    # The newest token is read at once: its value alone decides a one-sided change.
    moved = dataclasses.replace(text, v=text.v.copy())
    moved.v[:, 41] += 1.0
    _, changed, _ = lt.run(every, moved, LENGTHS, COUNT, width=WIDTH)
    assert (np.abs(changed[1, 0] - o[1, 0]).max(-1) > 1e-4).all()


def test_kernels_that_are_named_choose_the_same_chunks(monkeypatch):
    """Of a layer among others, with landmarks that a kernel can read: 136 of them."""
    plain = dataclasses.replace(POLICY, budget=160, slots=None)
    spec = dataclasses.replace(lt.SPEC, head_dim=64, num_heads=8, num_kv_heads=1)
    empty = plain.init(spec, 1, 512, jnp.bfloat16)
    assert empty.landmark.shape == (1, 1, 136, 64)
    draw = np.random.default_rng(3)

    def two(x):
        return jnp.stack([x, x])

    state = dataclasses.replace(jax.tree.map(two, empty), index=jnp.int32(1))
    landmark = jnp.asarray(draw.normal(size=state.landmark.shape), jnp.bfloat16)
    state = dataclasses.replace(
        state,
        landmark=landmark,
        excluded=jnp.asarray(draw.random(state.excluded.shape) < 0.3),
    )
    q = jnp.asarray(draw.normal(size=(1, 1, 8, 64)), jnp.bfloat16)
    k, ones = q[:, :, :1], jnp.ones((1, 1), bool)
    tokens = Tokens(
        q_pre=q,
        k_pre=k,
        q=q,
        k=k,
        v=k,
        positions=jnp.zeros((1, 1), jnp.int32),
        is_real=ones,
    )

    def chosen(policy):
        found, _ = jax.jit(lambda s, t: policy.select(s, t, spec))(state, tokens)
        assert found.valid.all()
        return np.asarray(found.ids)

    want = chosen(plain)
    assert want.shape == (1, 1, 40)
    one_block = landmarks.Config(cluster=1, slots=4)
    monkeypatch.setattr(landmarks, "pick", lambda **_: one_block)
    with interpreted():
        named = dataclasses.replace(plain, landmarks="mosaic", top_k="mosaic")
        np.testing.assert_array_equal(chosen(named), want)


@pytest.mark.parametrize("slots", [3, 0], ids=["slots", "values"])
def test_the_op_attends_to_the_same(text, result, slots):
    policy = dataclasses.replace(POLICY, attention="xla", slots=slots or None)
    _, o, state = lt.run(policy, text, LENGTHS, COUNT, width=WIDTH)
    assert state.v_slot.shape[2] == slots
    np.testing.assert_allclose(o, result[1], atol=1e-5)


def test_a_rotation_that_the_op_does_not_know_is_refused():
    policy = dataclasses.replace(POLICY, attention="xla")
    half = Rotation(RopeConfig(fraction=0.5))
    for rotate in (half, lambda x, positions: x):
        spec = dataclasses.replace(lt.SPEC, rotate=rotate)
        with pytest.raises(
            NotImplementedError, match="all dimensions of a key to turn"
        ):
            policy.check(spec, 72)
    policy.check(PLAIN, 72)


@pytest.mark.parametrize("field", ["landmarks", "top_k", "attention"])
def test_a_kernel_that_cannot_choose_is_refused_before_anything_is_made(field):
    policy = dataclasses.replace(POLICY, **{field: "mosaic"})
    with (
        hw.assume(),
        pytest.raises(NotImplementedError, match=r"the kernel takes|short"),
    ):
        policy.check(lt.SPEC, 72)


def read_whole(text, places):
    """What is read where every chunk may be chosen, and what dense attention reads."""
    # Between two choices, a new outlier is still in the ring, and read once.
    policy = dataclasses.replace(
        POLICY, budget=72, slots=18, generated_outliers=places, refresh_every=7
    )
    lengths = [40, 40, 40]
    _, o, state = lt.run(policy, text, lengths, COUNT, width=WIDTH)
    _, dense, _ = lt.run(DenseCacheConfig(), text, lengths, COUNT, width=WIDTH)
    return o, dense, state


def test_generated_chunks_that_the_basis_misses_are_kept(text):
    strange = text.k.copy()
    strange[0, 41:45] = np.random.default_rng(9).normal(size=strange[0, 41:45].shape)
    text = dataclasses.replace(text, k=strange)
    for places, expected in ((2, True), (0, False)):
        o, dense, state = read_whole(text, places)
        is_exact = np.abs(o - dense)[:, 0].max() < 2e-5
        assert is_exact == expected
        np.testing.assert_allclose(o[:, 1:], dense[:, 1:], atol=2e-5)
        assert (np.asarray(state.residual) > 0.3).tolist() == [
            not expected,
            False,
            False,
        ]


def test_a_row_of_padding_keeps_its_cache(text):
    arrays, each = tuple(text.__dict__.values()), 3

    def on(state, real, calls):
        outputs = []
        for _ in range(calls):
            now = state, jnp.asarray(real)
            o, state = lt.steps(POLICY, lt.SPEC, each, arrays, state.length, *now)
            outputs.append(np.asarray(o))
        return np.concatenate(outputs), state

    _, _, before = lt.run(POLICY, text, [40, 2, 32], each, width=WIDTH)
    o, after = on(before, [True, False, True], 7)
    assert not np.isnan(o).any()
    assert before.rank_used[1] == 5  # of 6
    names = ("length", "start", "slot_chunk", "slot_age", "ring_k", "out_k", "hits")
    for name in (*names, "rank_used", "basis"):
        np.testing.assert_array_equal(
            np.asarray(after[name])[1], np.asarray(before[name])[1], err_msg=name
        )
    # It goes on as if it had never waited, in chunks of other numbers.
    (alone, _), (straight, _) = (on(state, [True] * 3, 3) for state in (after, before))
    np.testing.assert_allclose(alone[:8, 1], straight[:8, 1], atol=2e-5)


def test_two_thousand_steps_are_one_program():
    """What was generated long ago is chosen among; nothing compiles anew."""
    calls, each, lengths = 4, 512, [30, 3]
    text = lt.draw(rows=2, length=lengths[0] + calls * each, rank=6)
    _, _, state = lt.run(POLICY, text, lengths, each)
    arrays, real = tuple(text.__dict__.values()), jnp.ones((2,), bool)
    programs = lt.steps._cache_size()
    for _ in range(1, calls):
        length = state.length
        o, state = lt.steps(POLICY, lt.SPEC, each, arrays, length, state, real)
    assert lt.steps._cache_size() == programs
    for b, length in enumerate(lengths):
        n = length + calls * each
        q, k, v = text.row(b, n)
        starts, outlier = reference.shadowkv_chunks(
            k, length, chunk=4, local_window=8, num_outliers=2, num_sinks=1
        )
        kept = reference.shadowkv_keep(
            q[-1], k, starts, outlier, chunk=4, chosen=2, scale=lt.SPEC.scale
        )
        expected = reference.attend(q[-1], k, v, kept, lt.SPEC.scale)
        np.testing.assert_allclose(o[-1, b], expected, atol=5e-5)
        # Chosen tokens far behind the window, which no buffer of 128 tokens holds.
        assert kept[:, 200 : n - 200].any()


def test_a_step_moves_rows_of_the_host_buffer_and_never_the_whole():
    policy = dataclasses.replace(POLICY, values="host")
    batch = 3
    cache = PolicyCache.init([policy] * 2, lt.SPEC, batch, 72, jnp.float32)
    (layers,) = cache.states
    values = layers.values
    assert values.sharding.memory_kind == "pinned_host"
    text = lt.draw(length=4)

    def step(layers, index):
        state = dataclasses.replace(layers, index=index)
        tokens = text.tokens([[3]] * batch)
        o, state = lt.decode_step(policy, state, tokens, lt.SPEC)
        return o, dataclasses.replace(state, index=None)

    traced = jax.jit(step).trace(layers, jnp.int32(1))
    hlo = traced.lower(lowering_platforms=("cuda",)).as_text()
    moved = [line for line in hlo.splitlines() if "annotate_device_placement" in line]
    # A block to the host, and the rows that the host's memory gives.
    assert len(moved) >= 2
    whole = "x".join(map(str, values.shape))
    one = "x".join(map(str, values.shape[1:]))
    flat = f"{values.size // values.shape[-1]}x{values.shape[-1]}"
    assert f"tensor<{whole}x" in hlo
    assert f"tensor<{flat}x" in hlo
    for line in moved:
        assert not any(f"tensor<{shape}x" in line for shape in (whole, one, flat))


def test_beyond_its_capacity_it_forgets_and_breaks_nothing(text):
    """A text longer than the cache: the last place for chunks is no chunk's."""
    lengths = [30, 2, 17]
    _, o, state = lt.run(POLICY, text, lengths, COUNT, room=48, width=40)
    assert np.isfinite(o).all()
    assert state.first.shape[1] == 13
    # Ten numbers are those of the prompt's places, two are left.
    assert int(state.next_chunk) == 12
    assert np.asarray(state.excluded)[:, :, -1].all()
    # What fits is read as by a cache with room.
    _, roomy, _ = lt.run(POLICY, text, lengths, COUNT, width=WIDTH)
    np.testing.assert_allclose(o[:11], roomy[:11], atol=2e-5)


def test_energy_and_basis_are_those_of_the_singular_values():
    rng = np.random.default_rng(0)
    rank, width, rows = 20, 64, 400
    u, _ = np.linalg.qr(rng.normal(size=(rows, width)))
    w, _ = np.linalg.qr(rng.normal(size=(width, width)))
    real = jnp.ones((1, rows), bool)

    @jax.jit
    def run(keys):
        products = low_rank.gram(keys, real)
        return low_rank.basis(products, rank), low_rank.basis_reference(products, rank)

    for power in (0.5, 1.0, 2.0):
        values = np.arange(1, width + 1) ** -power
        keys = ((u * values) @ w.T)[None].astype(np.float32)
        (found, count, energy), (exact, _, best) = run(keys)
        assert count[0] == rank
        lost = np.sqrt((values[rank:] ** 2).sum() / (values**2).sum())
        for basis, limit in ((found, 1.01), (exact, 1.0001)):
            missed = keys[0] - keys[0] @ np.asarray(basis[0] @ basis[0].T)
            residual = np.linalg.norm(missed) / np.linalg.norm(keys)
            assert residual <= limit * lost + 3e-3
        np.testing.assert_allclose(energy[0], 1 - lost**2, atol=0.02 * lost**2 + 1e-5)
        np.testing.assert_allclose(best[0], 1 - lost**2, atol=1e-5)
        np.testing.assert_allclose(found[0].T @ found[0], np.eye(rank), atol=1e-5)


def test_keys_are_compressed_before_the_rotation(text):
    """Keys of rank 6 are not of rank 6 once each token is turned by its own angle."""
    o, dense, _ = read_whole(text, places=0)
    np.testing.assert_allclose(o, dense, atol=2e-5)
    turned = lt.rotated(text.k[0], np.arange(72)).reshape(72, -1)
    assert np.linalg.matrix_rank(turned, tol=1e-3) > 6


def test_what_does_not_fit_is_refused(monkeypatch, caplog):
    for changes, message in (
        ({"rank": 17}, r"rank=17 is more than the 16 dimensions of 2 kv heads of 8"),
        ({"budget": 10}, r"budget=10 must be a multiple of chunk=4"),
        ({"slots": 1}, r"slots=1 must hold the 2 chunks"),
        ({"num_sinks": 3}, r"num_sinks=3 are outliers"),
        ({"refresh_every": 0}, "refresh_every=0 must be positive"),
        ({"values": "disk"}, "values='disk' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(POLICY, **changes).check(lt.SPEC, 40)
    named = dataclasses.replace(POLICY, values="host", fetch="mosaic")
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        named.check(lt.SPEC, 40)
    wide = dataclasses.replace(lt.SPEC, head_dim=4096)
    with hw.assume():
        named.check(dataclasses.replace(lt.SPEC, head_dim=64), 40)
        # A chunk's values of one kv head are one row.
        with pytest.raises(NotImplementedError, match="a row of 32768 bytes is more"):
            named.check(wide, 40)
    text = lt.draw(length=40)
    with pytest.raises(ValueError, match="T=40 tokens, more than the 35 tokens"):
        lt.run(POLICY, text, [40, 1, 1], 1, room=32)
    with caplog.at_level(logging.INFO, "jaxaccel"):
        dataclasses.replace(POLICY, values=None).check(lt.SPEC, 40)
    # Once a process: another test may have been first.
    assert not caplog.text or "is on the device: the memory of" in caplog.text

"""`engram_hash`: published constants, and four forms that give the same bits."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import engram_hash
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels.engram_hash import HashLayout, hash_on_host, specs, xla
from pallas_kernels.engram_hash.api import choose
from pallas_kernels.engram_hash.layout import is_prime


CI = {spec.name: spec for spec in specs.specs("ci")}
TINY, V41 = CI["ci_tiny"].layout, CI["ci_v41"].layout


def test_layouts_are_the_published_ones():
    assert V41.num_rows == (384_006_168, 384_016_682)
    assert V41.multipliers == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )
    first = (57, 79, 81, 97, 121, 129, 133, 183)
    assert V41.primes[0][:8] == tuple(16_000_000 + p for p in first)
    assert (V41.primes[0][-1], V41.primes[1][-1]) == (16_000_463, 16_000_889)
    assert V41.primes[1][:3] == (16_000_477, 16_000_487, 16_000_499)
    demo = HashLayout.create(vocab_size=99_092, pad_id=2, layer_ids=(1, 15))
    assert demo.num_rows == (10_344_164, 10_348_242)
    assert [row[0] for row in demo.primes] == [646_403, 646_631]
    assert [row[-1] for row in demo.primes] == [646_619, 646_879]
    assert TINY.multipliers[0] == (
        78284821251697249,
        4944257750913641,
        36735214942979007,
    )
    assert TINY.primes == ((101, 103, 107, 109),)
    for layout in (V41, demo, TINY):
        all_primes = list(itertools.chain(*layout.primes))
        assert len(set(all_primes)) == len(all_primes)


def test_primality_is_exact():
    sieve = np.ones(4000, bool)
    sieve[:2] = False
    for n in range(2, 64):
        sieve[n * n :: n] = False
    assert [is_prime(n) for n in range(4000)] == sieve.tolist()
    # Strong pseudoprimes to the bases 2, 3 and 5, and the largest prime below 2^31.
    assert not any(map(is_prime, (2047, 1_373_653, 25_326_001)))
    assert is_prime(2**31 - 1)


def _by_long_integers(tokens, layout):
    """The formula for the last token, in Python's integers."""
    mix, start, ids = 0, 0, []
    for i, m in enumerate(layout.multipliers[0]):
        mix ^= tokens[-1 - i] * m
        if i + 1 in layout.orders:
            first = layout.orders.index(i + 1) * layout.heads
            for p in layout.primes[0][first : first + layout.heads]:
                ids.append(mix % p + start)
                start += p
    return ids


def test_ids_are_the_published_ones():
    tokens = np.array([[5, 17, 5, 17, 96, 0]], np.int32)
    expected = [
        (70, 145, 218, 354),
        (80, 163, 275, 393),
        (6, 149, 226, 406),
        (80, 163, 305, 325),
        (21, 103, 224, 412),
        (40, 166, 210, 315),
    ]
    v41_tokens = np.array([[10, 20, 30, 99_091]], np.int32)
    v41_first = [7617624, 27319522, 45079884, 51704547, 66116316, 94513672]
    v41_first += [110136098, 113499312]
    forms = {
        "host": hash_on_host,
        **{
            name: jax.jit(
                functools.partial(engram_hash, implementation=name), static_argnums=1
            )
            for name in ("xla", "reference")
        },
    }
    for name, form in forms.items():
        as_input = np.asarray if name == "host" else jnp.asarray
        ids, _ = form(as_input(tokens), TINY)
        np.testing.assert_array_equal(np.asarray(ids)[0, :, 0], expected, name)
        assert ids.dtype == np.int32
    # All forms are equal at this layout, the test below says.
    last = hash_on_host(v41_tokens, V41)[0][0, -1, 0]
    assert last[:8].tolist() == v41_first
    assert last[-1] == 380488656
    assert last.tolist() == _by_long_integers([10, 20, 30, 99_091], V41)


def _flags(rng, shape):
    """Random packing: borders on real tokens, ends, dead tokens, padding."""
    real = rng.random(shape) < 0.8
    first = real & (rng.random(shape) < 0.2)
    last, dead = rng.random(shape) < 0.15, rng.random(shape) < 0.15
    return {"is_first": first, "is_last": last, "is_dead": dead, "is_real": real}


@functools.cache
def _compiled(spec_name, implementation, flagged):
    layout = CI[spec_name].layout

    def call(tokens, history, flags):
        return engram_hash(
            tokens,
            layout,
            history=history,
            implementation=implementation,
            **(flags if flagged else {}),
        )

    return jax.jit(call)


@pytest.mark.parametrize("name", CI)
def test_all_forms_are_equal_with_x64_off(name):
    assert not jax.config.read("jax_enable_x64")
    spec, rng = CI[name], np.random.default_rng(0)
    layout, shape = spec.layout, (spec.batch, spec.time)
    top = layout.vocab_size - 1
    cases = [rng.integers(0, top + 1, shape) for _ in range(3)]
    cases += [np.zeros(shape), np.full(shape, top), np.full(shape, layout.pad_id)]
    for case in cases:
        tokens = case.astype(np.int32)
        flags = _flags(rng, shape)
        history = rng.integers(-1, top + 1, (spec.batch, layout.max_order - 1))
        # Behind a stop there is nothing.
        newest_first = np.minimum.accumulate(history[:, ::-1], axis=1)
        history = np.where(newest_first < 0, -1, history[:, ::-1])[:, ::-1]
        history = np.ascontiguousarray(history, dtype=np.int32)
        for flagged in (False, True):
            chosen = flags if flagged else {}
            want = hash_on_host(tokens, layout, history=history, **chosen)
            for implementation in ("xla", "reference"):
                form = _compiled(name, implementation, flagged)
                got = form(tokens, history, flags)
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_array_equal(a, b, implementation)


@pytest.mark.parametrize(
    ("layout", "time"), [(TINY, 70), (V41.layer(1), 5)], ids=["tiny", "v41"]
)
def test_the_kernel_gives_the_ids_of_the_host(layout, time):
    rng, shape = np.random.default_rng(4), (2, time)
    tokens = rng.integers(0, layout.vocab_size, shape).astype(np.int32)
    tokens[0, :2], tokens[0, 2:4] = layout.vocab_size - 1, 0
    flags = _flags(rng, shape)
    call = functools.partial(engram_hash, implementation="mosaic")
    with interpreted():
        got = jax.jit(call, static_argnums=1)(tokens, layout, **flags)
    for a, b in zip(got, hash_on_host(tokens, layout, **flags), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", [*specs.specs("perf")], ids=lambda spec: spec.name)
def test_the_kernel_lowers_for_the_card(spec):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    with hw.assume():
        step = jax.jit(specs.run(spec, "mosaic"))
        text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "pk_engram_hash" in text


def test_none_keeps_xla_while_a_row_speaks_for_one_size():
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    with hw.assume():
        choice = choose(tokens, TINY)
        assert choice.implementation == "xla"
        assert "one size alone" in choice.refused["mosaic"]
        none = jax.ShapeDtypeStruct((1, 0), jnp.int32)
        with pytest.raises(NotImplementedError, match="no tokens"):
            choose(none, TINY, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CI)
def test_the_kernel_on_the_card(name):
    spec, rng = CI[name], np.random.default_rng(5)
    layout, shape = spec.layout, (8, 1000)
    tokens = rng.integers(0, layout.vocab_size, shape).astype(np.int32)
    flags = _flags(rng, shape)
    call = functools.partial(engram_hash, implementation="mosaic")
    step = jax.jit(call, static_argnums=1)
    for _ in range(20):
        got = step(tokens, layout, **flags)
        for a, b in zip(got, hash_on_host(tokens, layout, **flags), strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)


def test_any_cutting_of_a_text_gives_the_same_ids():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 97, (3, 24)).astype(np.int32)
    flags = _flags(rng, tokens.shape)
    whole, end = hash_on_host(tokens, TINY, **flags)
    # Pieces are padded right to one length, so that one program reads them all.
    form, length = _compiled("ci_tiny", "xla", True), 8
    for _ in range(4):
        borders = [0]
        while borders[-1] < 24:
            borders.append(min(24, borders[-1] + int(rng.integers(1, length + 1))))
        history = np.full((3, 2), -1, np.int32)
        for start, stop in itertools.pairwise(borders):
            pad = ((0, 0), (0, length - (stop - start)))
            piece = {k: np.pad(v[:, start:stop], pad) for k, v in flags.items()}
            ids, history = form(np.pad(tokens[:, start:stop], pad), history, piece)
            np.testing.assert_array_equal(
                np.asarray(ids)[:, : stop - start], whole[:, start:stop]
            )
        np.testing.assert_array_equal(history, end)


def test_padding_borders_ends_and_dead_tokens():
    tokens = np.array([[5, 17, 6, 7]], np.int32)

    def row(place, sequence, **flags):
        flags = {k: np.array([v], bool) for k, v in flags.items()}
        ids, _ = hash_on_host(np.array([sequence], np.int32), TINY, **flags)
        return ids[0, place, 0].tolist()

    whole = hash_on_host(tokens, TINY)[0][0, :, 0].tolist()
    alone = row(0, [6])
    assert row(2, [5, 17, 6, 7], is_first=[0, 0, 1, 0]) == alone
    assert row(2, [5, 17, 6, 7], is_last=[0, 1, 0, 0]) == alone
    assert row(1, [5, 17, 6, 7], is_last=[0, 1, 0, 0]) == whole[1]
    assert row(2, [5, 17, 6, 7], is_dead=[0, 1, 0, 0]) == alone
    assert row(1, [5, 17, 6, 7], is_dead=[0, 1, 0, 0]) == row(0, [2])
    assert row(3, [5, 17, 96, 6], is_real=[1, 1, 0, 1]) == whole[2]
    # A token looks back only.
    assert row(1, [5, 17, 0, 0]) == whole[1]


def test_different_mixes_share_few_heads():
    """Heads that collide have primes whose product is below 2^63: two, from 2^21 on."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 97, (64, 3)).astype(np.int32)
    layout = HashLayout.create(
        vocab_size=97, pad_id=2, layer_ids=(1,), heads=4, bases=2_262_400
    )
    ids = hash_on_host(tokens, layout)[0][:, 2, 0, 4:]
    different = dict(zip(map(tuple, tokens.tolist()), ids, strict=True))
    assert len(different) > 32
    for a, b in itertools.combinations(different.values(), 2):
        assert np.sum(a == b) <= 2
    # The worst case, made by hand: a difference of mixes that two primes divide.
    p, q, r, s = layout.primes[0][:4]
    assert p * q < 2**63 < p * q * r
    primes = np.array([[p, q, r, s]], np.uint32)
    high, low = (jnp.full((1, 4), x, jnp.uint32) for x in divmod(p * q, 2**32))
    rest = xla.remainder(high, low, primes)
    np.testing.assert_array_equal(rest, [[0, 0, p * q % r, p * q % s]])


def test_remainder_and_product_are_exact():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 2**32, (2, 512), dtype=np.uint64)
    a[:2], b[:2] = 2**32 - 1, 2**32 - 1
    high = xla.multiply_high(jnp.asarray(a, jnp.uint32), jnp.asarray(b, jnp.uint32))
    np.testing.assert_array_equal(high, (a * b) >> np.uint64(32))
    for p in (2, 3, 101, 16_000_057, 2**31 - 1):
        primes = np.full(512, p, np.uint32)
        rest = xla.remainder(
            jnp.asarray(a, jnp.uint32), jnp.asarray(b, jnp.uint32), primes
        )
        wide = [(int(x) << 32 | int(y)) % p for x, y in zip(a, b, strict=True)]
        np.testing.assert_array_equal(rest, wide)


def test_the_artifact_keeps_every_digit():
    text = json.dumps(TINY.to_json())
    assert '"78284821251697249"' in text
    assert HashLayout.from_json(json.loads(text)) == TINY
    rounded = json.loads(text)
    rounded["multipliers"][0][0] = float(78284821251697249)
    with pytest.raises(ValueError, match="decimal string"):
        HashLayout.from_json(rounded)
    del rounded["primes"]
    with pytest.raises(ValueError, match=r"lacks \['primes'\]"):
        HashLayout.from_json(rounded)
    with pytest.raises(ValueError, match="no hash layout"):
        HashLayout.from_json({"format": "other"})


def test_what_is_not_allowed_is_named():
    tokens = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="float32"):
        engram_hash(tokens.astype(jnp.float32), TINY)
    with pytest.raises(ValueError, match="is_first"):
        engram_hash(tokens, TINY, is_first=jnp.zeros((1, 3), bool))
    with pytest.raises(ValueError, match="history"):
        engram_hash(tokens, TINY, history=jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="token id 97 is outside"):
        hash_on_host(np.array([[97]]), TINY)
    with pytest.raises(ValueError, match="4 of layer 0 is no prime"):
        dataclasses.replace(TINY, primes=((4, 103, 107, 109),))
    with pytest.raises(ValueError, match="must be odd and below"):
        dataclasses.replace(TINY, multipliers=((2**62 + 1, 1, 1),))
    with pytest.raises(ValueError, match="row numbers are int32"):
        HashLayout.create(vocab_size=97, pad_id=2, layer_ids=(1,), heads=8, bases=2**28)

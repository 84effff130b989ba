"""The offload benchmark compares gradients before it tells a speed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import benchmarks
from jaxaccel.benchmarks import offload, offload_longest, offload_stack
from jaxaccel.core.offload import offload_scan


SMALL = [
    *("--num_layers", "3", "--d_model", "16", "--d_ff", "24", "--num_heads", "2"),
    *("--num_kv_heads", "1", "--head_dim", "8", "--dtype", "float32"),
    *("--attention", "reference"),
]
STACK = offload_stack.Stack(
    num_layers=4,
    tokens=16,
    d_model=8,
    d_ff=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
    attention="reference",
)


class Plain(offload_stack.Stack):
    """Layers that compile at once."""

    @property
    def shapes(self):
        return {"up": (self.num_layers, self.d_model, self.d_model)}

    def layer(self, w, x, consts):
        return x + jnp.tanh(x @ w["up"]), None


def test_rows_of_all_modes(tmp_path, capsys):
    path = tmp_path / "rows.json"
    options = ["--tokens", "8", "--rounds", "2", "--modes", "remat,ring"]
    assert benchmarks.main(["offload", *SMALL, *options, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["remat", "ring"]
    assert all(row["ms"] > 0 and row["gradients_apart"] < 1e-5 for row in rows)
    assert rows[0]["ratio"] == 1.0
    assert rows[1]["planned_host_gib"] == pytest.approx(
        3 * 8 * 16 * 4 / 2**30, rel=1e-3
    )
    assert rows[1]["device"]
    assert "ring" in capsys.readouterr().out


def test_no_speed_for_another_layers_input(monkeypatch):
    def reversed_scan(body, ws, x, consts=(), *, mode, **options):
        if mode == "ring":
            ws = jax.tree.map(lambda w: w[::-1], ws)
        return offload_scan(body, ws, x, consts, mode="remat")

    monkeypatch.setattr(offload_stack, "offload_scan", reversed_scan)
    plain = Plain(num_layers=4, tokens=8, d_model=8, dtype="float32")
    remat, ring = offload.measure(plain, ["remat", "ring"], rounds=2)
    assert remat["ms"] > 0
    assert ring["ms"] is None
    assert ring["gradients_apart"] > 0.1
    assert "no speed" in ring["note"]


def test_out_of_memory_is_a_row(monkeypatch):
    def full(stack, name):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte is missing")

    monkeypatch.setattr(offload_stack, "gradient_function", full)
    plain = Plain(num_layers=4, tokens=8, d_model=8, dtype="float32")
    (row,) = offload.measure(plain, ["remat"], rounds=2)
    assert (row["ms"], row["note"]) == (None, "out of memory")


def test_a_mode_that_fails_later_keeps_the_others():
    def late(ws, x):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte is missing")

    contender = offload_stack.Contender(name="ring", call=late)
    offload._run_round(contender, None, None)
    assert (contender.call, contender.rounds_ms) == (None, [])
    assert "out of memory" in contender.note
    offload._run_round(contender, None, None)


def test_the_link_is_timed_both_ways():
    assert set(offload.link_speed(2**16, repeats=1)) == {
        "to_host_gbps",
        "to_device_gbps",
    }


def test_fingerprints_tell_a_shifted_layer():
    grads = {
        "w": jax.random.normal(jax.random.key(0), (3, 6, 5)),
        "x": jnp.ones((4, 5)),
    }
    want = offload_stack.fingerprint(grads)
    assert offload_stack.apart(offload_stack.fingerprint(grads), want) == 0.0
    shifted = grads | {"w": jnp.roll(grads["w"], 1, axis=0)}
    assert offload_stack.apart(offload_stack.fingerprint(shifted), want) > 0.1
    scaled = jax.tree.map(lambda g: g * 1.02, grads)
    assert (
        offload_stack.apart(offload_stack.fingerprint(scaled), want)
        > offload.GRADIENT_TOLERANCE
    )
    for broken in (
        grads | {"x": grads["x"] * jnp.nan},
        grads | {"w": grads["w"].at[1, 2, 3].set(jnp.nan)},
    ):
        assert np.isnan(offload_stack.apart(offload_stack.fingerprint(broken), want))


@pytest.mark.parametrize("true_size", range(14))
@pytest.mark.parametrize("first", [1, 5, 40])
def test_the_search_finds_the_largest(true_size, first):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= true_size

    found = offload_longest.largest(fits, first, 2, 12)
    assert found == min(true_size // 2 * 2, 12)
    assert len(asked) == len(set(asked))
    assert max(asked) <= 12


@pytest.mark.parametrize("true_size", [20, 21, 24])
def test_a_good_guess_costs_two_trials(true_size):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= true_size

    needs = {4: 140, 8: 180}.get  # 100 and 10 for each
    first = offload_longest.guess(needs, 4, 100 + 10 * true_size)
    assert first == true_size
    assert offload_longest.largest(fits, first, 4, 100) == true_size // 4 * 4
    assert len(asked) == 2
    assert offload_longest.guess(lambda size: None, 4, 10**9) == 4


def test_the_deepest_stack_is_what_the_limit_has_room_for(monkeypatch):
    """Compiled programs say what they need; what needs more is not even run."""
    stack = Plain(num_layers=1, tokens=8, d_model=8, dtype="float32")

    def needs(size):
        sized = dataclasses.replace(stack, num_layers=size)
        return offload_stack.compiled(sized, "remat").device_bytes

    ran, limit = [], needs(6)
    assert needs(8) > limit
    for module in (offload_longest, offload_stack):
        monkeypatch.setattr(module, "bytes_limit", lambda: limit)
    second_call_ms = offload_longest.second_call_ms

    def counted(stack, contender):
        ran.append(stack.num_layers)
        return second_call_ms(stack, contender)

    monkeypatch.setattr(offload_longest, "second_call_ms", counted)
    (row,) = offload_longest.longest(stack, ["remat"], "layers", step=2, most=100)
    assert row["layers"] == 6
    assert ran == [6]
    assert row["workload"] == "most layers: d 8, ff 14336, heads 32/8, T 8"
    assert row["tokens_per_s"] > 0
    # A call that runs out of memory after all: the next smaller one.
    monkeypatch.setattr(
        offload_longest,
        "second_call_ms",
        lambda stack, _: 1.0 if stack.num_layers < 6 else None,
    )
    (row,) = offload_longest.longest(stack, ["remat"], "layers", step=2, most=100)
    assert (row["layers"], row["ms"]) == (4, 1.0)
    assert row["note"] == "6 fitted as compiled and ran out of memory"
    # Without room for one, there is no time and no error.
    monkeypatch.setattr(offload_stack, "bytes_limit", lambda: 1)
    (row,) = offload_longest.longest(stack, ["remat"], "layers", step=2, most=100)
    assert (row["layers"], row["ms"], row["tokens_per_s"]) == (0, None, None)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (["ring"], "must begin with 'remat'"),
        (["remat", "rings"], "'rings' is unknown"),
        (["remat", "ring+graph"], r"'ring\+graph' is unknown"),
    ],
)
def test_modes_are_checked_before_anything_runs(modes, message):
    with pytest.raises(ValueError, match=message):
        offload.measure(STACK, modes, rounds=1)


def test_it_counts_the_operations_of_every_matrix():
    d, f, t = 8, 12, 16
    matrices = d * 8 + 2 * d * 4 + 8 * d + 3 * d * f
    pairs = t * (t + 1) // 2
    assert STACK.flops == 3 * 4 * (2 * t * matrices + 4 * pairs * 2 * 4)

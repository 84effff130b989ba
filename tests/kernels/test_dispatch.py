"""Dispatch, hardware limits, tuned configs and the interpreter's own strictness."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels._common import dispatch, hw, tuning
from pallas_kernels._common.forward_only import forward_only
from pallas_kernels._common.interpret import interpreted, is_interpreting


X = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((256,), jnp.float32)


def test_automatic_takes_the_best_that_can_and_says_so_once(caplog):
    dispatch._announce.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for _ in range(2):
            choice = dispatch.select("an_op", None, {"mosaic": "no card"})
    assert choice.implementation == "xla"
    assert [r.getMessage() for r in caplog.records] == [
        "an_op runs xla; not mosaic: no card"
    ]


def test_named_is_obeyed_or_refused():
    assert dispatch.select("an_op", "reference", {}).implementation == "reference"
    with pytest.raises(NotImplementedError, match="no card"):
        dispatch.select("an_op", "mosaic", {"mosaic": "no card"})
    with pytest.raises(ValueError, match="'triton' is unknown"):
        dispatch.select("an_op", "triton", {})
    with pytest.raises(NotImplementedError, match="nothing can run"):
        dispatch.select("an_op", None, {"xla": "no"}, available=("xla",))


def test_choices_made_inside_are_recorded():
    with dispatch.recorded_choices() as outer:
        dispatch.select("an_op", "reference", {})
        with dispatch.recorded_choices() as inner:
            dispatch.select("an_op", None, {"mosaic": "no card"})
            with pytest.raises(NotImplementedError):
                dispatch.select("an_op", "mosaic", {"mosaic": "no card"})
    dispatch.select("an_op", "reference", {})
    assert [choice.implementation for choice in outer] == ["reference", "xla"]
    assert [dict(choice.refused) for choice in inner] == [{"mosaic": "no card"}]
    x, scale = (jnp.zeros(s.shape, s.dtype) for s in (X, SCALE))
    with dispatch.recorded_choices() as traced:
        jax.jit(pallas_kernels.rms_norm).lower(x, scale)
    assert [choice.op for choice in traced] == ["rms_norm"]


def test_explain_names_the_kernel_and_its_tiling():
    with hw.assume():
        choice = pallas_kernels.explain("rms_norm", X, SCALE)
    assert choice.implementation == "mosaic"
    assert "threads=" in str(choice)
    with pytest.raises(ValueError, match="no_op"):
        pallas_kernels.explain("no_op")


def test_the_op_is_a_function_however_it_was_imported():
    import pallas_kernels.rms_norm.api

    assert callable(pallas_kernels.rms_norm)


def test_shared_memory_over_the_limit_is_refused():
    with hw.assume():
        hw.check_smem(227 * 1024)
        with pytest.raises(ValueError, match=r"232449 bytes.*232448"):
            hw.check_smem(227 * 1024 + 1, "a kernel")


def test_register_requests_that_would_hang_the_card_are_refused():
    with hw.assume():
        hw.check_registers([24, 104, 192, 192])
        with pytest.raises(ValueError, match="= 520 registers"):
            hw.check_registers([32, 104, 192, 192])
        hw.check_registers([160, 160, 184])
        with pytest.raises(ValueError, match=r"= 512 registers.*block of 3 has 504"):
            hw.check_registers([160, 160, 192])
        with pytest.raises(ValueError, match="250"):
            hw.check_registers([250])


def test_off_the_card_the_facts_are_an_h200s():
    if jax.default_backend() == "gpu":
        return
    assert hw.device().sms == 132
    assert hw.device().slug == "nvidia_h200"
    assert not hw.is_hopper()
    with hw.assume():
        assert hw.is_hopper()


def test_tuned_tables_parse_and_buckets_are_powers_of_two():
    assert [tuning.bucket(n) for n in (1, 2, 3, 128, 129)] == [1, 2, 4, 128, 256]
    with pytest.raises(ValueError, match="size=0"):
        tuning.bucket(0)
    assert tuning.key(rows=4, dtype="float32") == "rows=4,dtype=float32"
    assert tuning.lookup("no_op", "rows=4", device="nvidia_h200") is None


def test_an_unknown_card_is_announced_once(caplog):
    tuning._announce_unknown.cache_clear()
    tuning._table.cache_clear()
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        for op in ("rms_norm", "attention"):
            assert tuning.lookup(op, "rows=4", device="abacus") is None
    assert len(caplog.records) == 1
    assert "abacus" in caplog.records[0].getMessage()


def test_a_tuned_entry_is_used_and_can_hand_a_direction_to_xla(monkeypatch):
    from pallas_kernels.rms_norm import api, config

    measured = {"threads": 32, "rows": 8, "stages": 0, "blocks_per_sm": 4}
    table = {
        config.table_key(8, 256, jnp.bfloat16, "fwd", False): measured,
        config.table_key(8, 256, jnp.bfloat16, "bwd", False): {
            **measured,
            "xla_is_faster": True,
        },
    }
    table = json.loads(json.dumps(table))
    monkeypatch.setattr(tuning, "_table", lambda device, op: table)
    with hw.assume():
        choice = api.choose(X, SCALE)
        named = api.choose(X, SCALE, implementation="mosaic")
    assert choice.config == api.Kernels(fwd=config.Config(**measured), bwd=None)
    assert named.config.bwd == config.Config(**measured)


def racing(two_writers):
    """One warpgroup writes and reads shared memory; a second writes it at once."""

    def body(y_ref, shared):
        warpgroup = jax.lax.axis_index("wg")

        @pl.when(warpgroup < (2 if two_writers else 1))
        def _():
            shared[...] = jnp.full((128,), 1.0, jnp.float32)

        @pl.when(warpgroup == 0)
        def _():
            y_ref[...] = shared[...]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types={"shared": plgpu.SMEM((128,), jnp.float32)},
        num_threads=2,
        thread_name="wg",
    )


def test_the_interpreter_reports_a_race_even_of_an_earlier_kernel():
    assert not is_interpreting()
    with interpreted():
        assert is_interpreting()
        assert racing(False)()[0] == 1.0
    with pytest.raises(RuntimeError, match="race"), interpreted():
        jax.block_until_ready([racing(two_writers)() for two_writers in (True, False)])
    assert not is_interpreting()


def test_what_runs_only_if_named_is_never_picked():
    reason = {"mosaic": "no measured row"}
    choice = dispatch.select("op", None, {}, only_named=reason)
    assert choice.implementation == "xla"
    assert choice.refused == reason
    choice = dispatch.select("op", "mosaic", {}, only_named=reason)
    assert choice.implementation == "mosaic"
    assert choice.source == "named"
    refused = {"mosaic": "K = 7"}
    choice = dispatch.select("op", None, refused, only_named=reason)
    assert choice.refused == refused
    with pytest.raises(NotImplementedError, match="K = 7"):
        dispatch.select("op", "mosaic", refused, only_named=reason)


def test_a_written_table_is_found_again(tmp_path, monkeypatch):
    about = {"device": "d", "jax": "0", "date": "today", "commit": "left out"}
    path = tmp_path / "tuned" / "abacus" / "op.json"
    tuning.write(path, about, {"rows=4": {"stages": 3}})
    monkeypatch.setattr(tuning.importlib.resources, "files", lambda _: tmp_path)
    tuning._table.cache_clear()
    try:
        assert tuning.lookup("op", "rows=4", device="abacus") == {"stages": 3}
        assert "commit" not in json.loads(path.read_text())
    finally:
        tuning._table.cache_clear()


def test_a_gradient_through_a_kernel_that_has_none_names_the_op():
    def double(config, arrays, *, scale, more=None):
        assert config == "config"
        assert more is None
        return {"y": scale * arrays[0] * jnp.where(arrays[1], 2.0, 0.0)}

    x, mask, scale = jnp.arange(3.0), jnp.array([True, True, False]), jnp.ones(3)
    op = forward_only("an_op", double)

    def loss(x, scale):
        return jnp.sum(op("config", (x, mask), scale=scale)["y"])

    assert loss(x, scale) == jax.jit(loss)(x, scale) == 2.0
    for place in (0, 1):
        for asked in (jax.grad(loss, place), jax.jit(jax.grad(jax.jit(loss), place))):
            with pytest.raises(NotImplementedError, match=r"an_op: .*xla.* has one"):
                asked(x, scale)
    # What is held back asks for none.
    held = jax.grad(lambda x: loss(jax.lax.stop_gradient(x), scale) + jnp.sum(x))(x)
    assert held.tolist() == [1.0, 1.0, 1.0]
    rows = jax.vmap(lambda x: op("config", (x, mask), scale=scale)["y"])(x[None])
    assert rows.tolist() == [[0.0, 2.0, 0.0]]

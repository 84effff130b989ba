"""The benchmark of mixtures checks results before it tells a speed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import benchmarks
from jaxaccel.benchmarks import moe, moe_rivals
from jaxaccel.config.gin_utils import load_config
from jaxaccel.config.moe import MoEBenchConfig
from jaxaccel.nn.router import MoEConfig
from pallas_kernels._common import bench, timing


PRESET = """
import jaxaccel.config.moe
MoEBenchConfig:
    moe = @MoEConfig()
    d_model = 16
    tokens = 24
    dtype = "float32"
MoEConfig:
    num_experts = 4
    top_k = 2
    d_ff = 12
    d_latent = 8
    activation = "relu2"
    score = "sigmoid"
    bias_update_rate = 1e-3
    sequence_balance_loss_coef = 1e-4
    shared_d_ff = 8
"""


@pytest.fixture(autouse=True)
def one_run(monkeypatch):
    """One call instead of many; it is not the time that is tested."""

    def once(fn, args, cold=True):
        assert not cold
        jax.block_until_ready(fn(*args))
        return [timing.Timing(ms=2.0, timer="host", cache="warm")]

    monkeypatch.setattr(timing, "measure", once)
    monkeypatch.setattr(moe, "ceilings", lambda: bench.Ceilings(gbps=1.0, tflops=1e-6))
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_every_preset_is_a_layer():
    layers = {p.stem: load_config("MoEBenchConfig", [p]) for p in moe.preset_files()}
    assert tuple(layers) == moe.PRESETS
    gpt_oss = layers["gpt_oss_20b_layer"].moe
    assert (gpt_oss.use_bias, gpt_oss.swiglu_limit) == (True, 7.0)


def test_rows_of_a_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "routed_check", lambda *names: None)
    preset, path = tmp_path / "small.gin", tmp_path / "rows.json"
    preset.write_text(PRESET)
    options = [f"--gin_file={preset}", f"--json={path}", "--implementations=reference"]
    options += ["--parts=layer", "--directions=fwd+bwd"]
    assert benchmarks.main(["moe", *options]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["workload"] == "small T24 fwd+bwd"
    assert set(row["parts_ms"]) == {"router", "plan", "permute", "combine"}
    # Four parts and the layer take 2 ms each here.
    assert (row["overhead_ms"], row["share"]) == (8.0, 4.0)
    assert row["share_of_experts"] == 4.0
    routed, other = 24 * 2 * 2 * 8 * 12, 24 * (4 * 16 + 2 * 8 * 16 + 2 * 8 * 16)
    assert row["gemm_ms"] == pytest.approx(3 * 2 * (routed + other) / 1e3, rel=1e-3)
    assert row["ratio"] == pytest.approx(2.0 / row["gemm_ms"], rel=1e-3)
    assert row["temp_gib"] > 0
    assert row["device"]


def test_dispatch_has_no_speed_for_a_wrong_result(monkeypatch, tmp_path):
    """One place too few for the fullest expert: a table of one-hot vectors drops it."""
    full = moe_rivals.capacity_of
    monkeypatch.setattr(moe_rivals, "capacity_of", lambda *a: full(*a) // 2)
    path = tmp_path / "rows.json"
    sizes = ["--tokens=24", "--top_k=2", "--d_model=8", "--d_ff=12", "--experts=4"]
    options = ["--dtype=float32", "--implementations=xla", f"--json={path}"]
    options += ["--parts=dispatch", "--directions=fwd"]
    assert benchmarks.main(["moe", *sizes, *options]) == 1
    rows = {r["implementation"]: r for r in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["sort xla", "one_hot", "loop"]
    assert rows["sort xla"]["note"] == rows["loop"]["note"] == ""
    assert rows["one_hot"]["note"].startswith("wrong result: y")
    assert [row["ms"] for row in rows.values()] == [2.0, None, 2.0]
    assert [row["ratio"] for row in rows.values()] == [1.0, None, 1.0]


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_few_tokens_visit_their_experts(activation):
    sizes = moe_rivals.Sizes(
        tokens=3, slots=2, experts=5, width=8, d_ff=16, activation=activation
    )
    assert moe_rivals.has_visits(sizes)
    assert not moe_rivals.has_visits(dataclasses.replace(sizes, tokens=5))
    args = sizes.arguments()
    got = moe_rivals.only_forward(moe_rivals.visits(sizes, "reference"))(*args)
    assert moe_rivals.wrong(got, moe_rivals.expected(sizes, args)) is None


def test_an_expert_alone_can_be_wrong():
    want = tuple(np.ones((4, 3, 3), np.float32) for _ in moe_rivals.RESULTS)
    got = [jnp.asarray(a) for a in want]
    assert moe_rivals.wrong(tuple(got), want) is None
    got[3] = got[3].at[2].multiply(1.1)
    assert moe_rivals.wrong(tuple(got), want).startswith("dw_in")


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 9e-3), ("float32", 2e-5)])
def test_a_small_error_everywhere_is_wrong(dtype, error):
    want = (jnp.full((4, 16), 3.0),)
    assert moe_rivals.wrong((want[0].astype(dtype),), want) is None
    got = ((want[0] * (1 + error)).astype(dtype),)
    for slack in (1.0, moe_rivals.RIVAL_SLACK):
        assert moe_rivals.wrong(got, want, slack=slack).startswith("y: relative error")


def test_the_check_of_a_layer_has_its_biases_and_limit(monkeypatch):
    fields = {"num_experts": 4, "top_k": 2, "d_ff": 16, "score": "topk_softmax"}
    moe_config = MoEConfig(**fields, use_bias=True, swiglu_limit=7.0)
    config = MoEBenchConfig(moe=moe_config, d_model=16, tokens=24, dtype="float32")
    results, sort, wrong = [], moe_rivals.sort, moe_rivals.wrong

    def record(got, want):
        results.append((got, want))
        return wrong(got, want)

    monkeypatch.setattr(moe_rivals, "wrong", record)
    assert moe.routed_check(config, "reference") is None
    assert [len(a) for a in results[0]] == [len(moe_rivals.RESULTS)] * 2

    def without_limit(sizes, *names):
        return sort(dataclasses.replace(sizes, swiglu_limit=None), *names)

    monkeypatch.setattr(moe_rivals, "sort", without_limit)
    monkeypatch.setattr(moe_rivals, "expected", lambda *a: results[0][1])
    monkeypatch.setattr(moe_rivals, "with_gradients", moe_rivals.only_forward)
    assert moe.routed_check(config, "reference").startswith("y: relative error")


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_a_step_keeps_tokens_hidden_rows_weights_and_plan(activation):
    mixture = MoEConfig(num_experts=4, top_k=2, d_ff=32, activation=activation)
    config = MoEBenchConfig(moe=mixture, d_model=16, tokens=64, dtype="float32")
    row = moe.kept_row(config, "small", "xla")
    hidden = 32 if activation == "relu2" else 64
    bytes_ = 4 * (64 * 16 + 128 * hidden + 2 * 128 + 4)
    assert row["expected_gib"] == pytest.approx(bytes_ / 2**30, rel=1e-3)
    assert 0.99 < row["ratio"] < 1.05


def test_rows_are_added_to_those_of_a_file(tmp_path, monkeypatch):
    found = iter([{"note": "first"}, {"note": "second"}, {"note": "third"}])
    monkeypatch.setattr(moe, "_rows", lambda options: [next(found)])
    path = tmp_path / "rows.json"
    for options in ([], ["--append"], []):
        assert benchmarks.main(["moe", f"--json={path}", *options]) == 0
        notes = [row["note"] for row in json.loads(path.read_text())["rows"]]
        if options:
            assert notes == ["first", "second"]
    assert notes == ["third"]


def test_what_cannot_run_is_a_row():
    def refuse(*args):
        raise NotImplementedError("no kernel")

    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte is missing")

    assert moe.measure(refuse, (jnp.ones(2),)).note == "not available: no kernel"
    assert moe.measure(full, (jnp.ones(2),)).note == "out of memory"


def test_unknown_names_are_told(tmp_path):
    with pytest.raises(ValueError, match="--parts 'layers' is unknown"):
        benchmarks.main(["moe", "--parts=layers", f"--json={tmp_path / 'x.json'}"])

"""The benchmark of Nemotron 3 tells no speed of another model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import benchmarks
from jaxaccel.benchmarks import (
    nemotron,
    nemotron_decode,
    nemotron_layers,
    nemotron_train,
    step,
)
from jaxaccel.benchmarks.guards import require_kernels
from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.decoding.by_layer import LayeredDecoder
from jaxaccel.models.describe import describe
from jaxaccel.models.nemotron_h import NemotronHConfig
from pallas_kernels._common import bench, hw, timing
from pallas_kernels._common.bench import Ceilings


LIMITS = Ceilings(gbps=1.0, tflops=1e-6)
CONFIG = NemotronHConfig.tiny(pattern="ME*", param_dtype="bfloat16")
# As small as the kernels take.
OF_KERNELS = NemotronHConfig(
    vocab_size=512,
    d_model=256,
    pattern="MEM*",
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    mamba_heads=8,
    mamba_head_dim=64,
    mamba_groups=2,
    state_dim=128,
    num_experts=8,
    experts_per_token=2,
    d_expert=128,
    d_shared_expert=128,
    param_dtype="bfloat16",
)
# Steps and prompts of one token are one program.
SIZES = nemotron_decode.Sizes(prompt=1, new=4, rounds=1, checked=3, counted=2)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def one_run(monkeypatch):
    """One call instead of many; it is not the time that is tested."""

    def once(fn, args):
        jax.block_until_ready(fn(*args))
        return [timing.Timing(ms=32.0, timer="host", cache="warm")]

    monkeypatch.setattr(timing, "measure", once)


@pytest.fixture(scope="module")
def decoded():
    """Rows of a decoder whose check draws other tokens from the second call on."""
    gaps = iter([nemotron_decode.logit_gap, lambda *_: float("nan")])
    compiled, make = [], nemotron_decode._compile

    def once(*given):
        compiled.append(compiled[0] if compiled else make(*given))
        call, about = compiled[0]
        return call, dict(about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nemotron_decode, "_compile", once)
        patch.setattr(nemotron_decode, "logit_gap", lambda *given: next(gaps)(*given))
        return list(
            nemotron_decode.measure(
                # One kind of layer less to compile.
                dataclasses.replace(CONFIG, pattern="E*"),
                "tiny",
                implementation="xla",
                batches=(2, 2),
                sizes=SIZES,
                limits=LIMITS,
            )
        )


def test_a_decoded_model_has_its_speed_and_its_bytes(decoded):
    row = decoded[0]
    assert row["note"] == ""
    assert row["workload"] == "tiny batch 2, 8 slots"
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms"], rel=1e-2)
    moved = sum(row[f"{kind}_bytes"] for kind in ("weight", "expert", "state", "kv"))
    assert row["floor_ms"] == pytest.approx(moved / 1e6, rel=1e-3)
    assert row["share_of_limit"] == pytest.approx(row["floor_ms"] / row["ms"], rel=1e-2)
    # Two of four experts a token, and two tokens.
    assert 2 <= row["visited_experts"] <= 4
    assert row["runs"]["decode_attention"] == "xla"
    assert 0 <= row["logit_gap"] < 1e-3


def test_other_tokens_have_no_speed(decoded):
    assert decoded[1]["ms"] is None
    assert decoded[1]["note"].startswith("no speed: other tokens")


def test_a_gap_is_that_of_the_worst_token():
    class Model:
        """Logits that grow with the token, at every place."""

        def init_cache(self, *shape):
            assert shape == (1, 5)

        def read(self, parameters, text, cache):
            return dataclasses.make_dataclass("Output", ["hidden"])(text)

        def unembed(self, parameters, hidden):
            scores = jnp.broadcast_to(jnp.arange(4.0), (*hidden.shape, 4))
            return scores if parameters is None else scores * parameters

    def gap(tokens, factor=None):
        prompts, first = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,), jnp.int32)
        tokens = np.asarray([tokens], np.int32)
        return nemotron_decode.logit_gap(Model(), factor, prompts, first, tokens)

    assert gap([3, 3]) == 0
    assert gap([3, 1]) == pytest.approx(2 / np.arange(4.0).std())
    assert gap([3, 3], jnp.inf) == np.inf


def test_traffic_is_what_a_token_must_move():
    model = LayeredDecoder(CONFIG.decoder())
    parameters = jax.eval_shape(model.init, jax.random.key(0))

    def moved(batch, visited):
        return nemotron_decode.traffic(model, parameters, batch, 10, visited)

    cost = describe(CONFIG.decoder()).trunk
    one, two = moved(1, [2]), moved(2, [3])
    assert one.state == 2 * cost.state_bytes
    assert one.kv == 11 * cost.kv_bytes_per_token
    assert one.experts == 2 * 2 * CONFIG.d_latent * CONFIG.d_expert * 2
    assert two.experts == one.experts * 3 // 2
    assert two.weights - one.weights == CONFIG.d_model * 2  # a looked up row more
    # What a token reads by the table of `describe`, f32 parameters counted twice.
    f32 = cost.param_bytes - 2 * cost.params
    assert one.weights + one.experts == 2 * cost.active_params + f32


def layer_rows(kind, *names):
    found = nemotron_layers.measure(
        CONFIG,
        "tiny",
        implementations=names,
        kinds=(kind,),
        tokens=8,
        batches=(2,),
        limits=LIMITS,
    )
    return list(found)


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(nemotron_layers, "_CONTEXT", 40)
    monkeypatch.setattr(nemotron_layers, "_STEPS", 2)


def test_a_refused_layer_costs_no_other_row(few_steps):
    refused = layer_rows("attention", "mosaic")
    assert len(refused) == 3
    assert {row["ms"] for row in refused} == {None}
    assert all("no speed: not available" in row["note"] for row in refused)


def test_a_wrong_layer_is_named(few_steps, monkeypatch):
    """Programs of "mosaic" are those of "xla" with results that are changed."""
    program, changes = nemotron_layers.Layer.program, {}
    made = {}

    def changed(layer, implementation, direction, size, count=2):
        key = (direction, size, count)
        if key not in made:
            made[key] = program(layer, "xla", *key)
        if implementation == "xla":
            return made[key]
        change = changes.get(direction, lambda x: x)
        call = made[key].call
        return nemotron_layers.Program(
            lambda *given: jax.tree.map(change, call(*given)), 0
        )

    layer = nemotron_layers.Layer(CONFIG, "attention")
    monkeypatch.setattr(nemotron_layers.Layer, "program", changed)
    # Parameters are drawn once.
    monkeypatch.setattr(nemotron_layers, "Layer", lambda *_: layer)

    def notes(**given):
        changes.clear()
        changes.update({"fwd+bwd": given.pop("both")} if "both" in given else given)
        rows = layer_rows("attention", "mosaic")
        assert all((row["ms"] is None) == bool(row["note"]) for row in rows)
        return [row["note"] for row in rows]

    forward, both, decode = layer_rows("attention", "xla")
    assert [row["note"] for row in (forward, both, decode)] == [""] * 3
    assert (forward["ms"], decode["ms"]) == (32.0, 16.0)
    assert both["floor_ms"] == pytest.approx(3 * forward["floor_ms"], rel=1e-3)
    assert notes() == ["", "", ""]
    forward, both, decode = notes(fwd=lambda y: y * 1.05)
    assert forward.startswith("no speed: wrong result: y - x: relative error")
    assert (both, decode) == (forward, "")
    forward, both, decode = notes(both=lambda x: x * jnp.nan)
    assert (forward, decode) == ("", "")
    assert "wrong result: dx - dy" in both
    assert "not finite" in both
    # The norm's alone, the only vector.
    both = notes(both=lambda x: x * 2 if x.ndim == 1 else x)[1]
    assert "wrong result: the gradient of mixer_norm.scale: relative error" in both
    forward, both, decode = notes(decode=jnp.zeros_like)
    assert (forward, both) == ("", "")
    assert decode.startswith("no speed: wrong result: y - x: relative error")
    # Keys and values alone.
    decode = notes(decode=lambda x: x * 0 if x.ndim == 4 else x)[2]
    assert "wrong result: the change of k: relative error" in decode


def test_a_step_moves_its_states_twice_and_experts_that_rows_visit():
    layer = nemotron_layers.Layer(CONFIG, "mamba")
    mamba = CONFIG.decoder().mamba
    # Inputs of the convolution in f32 here, as the states.
    states = 4 * (
        mamba.d_inner * mamba.state_dim + (mamba.conv_width - 1) * mamba.conv_channels
    )
    assert layer.step_bytes(3) - layer.step_bytes(2) == 2 * states
    layer = nemotron_layers.Layer(CONFIG, "moe")
    visited = layer.step_bytes(1), layer.step_bytes(1000)
    matrices = 4 * 2 * CONFIG.d_latent * CONFIG.d_expert * 2
    assert visited[1] - visited[0] == pytest.approx(matrices / 2, rel=1e-3)


@pytest.fixture
def trained(monkeypatch):
    """Measures implementations whose losses are given, of two rounds of two steps."""
    batch = dataclasses.make_dataclass("Batch", ["segment_ids"])(np.ones((2, 8)))
    monkeypatch.setattr(nemotron_train, "device_batches", lambda *_: [batch] * 2)

    def measure(*, before=(), **losses):
        def ours(experiment, batch):
            found = losses[experiment.model.implementation["ssd"]]
            if found is None:
                raise NotImplementedError("of this width")
            # The warm-up and two rounds.
            drawn = iter([found[0], *[found[0]] * 4, found[1]])
            return step.Contender(
                name="jaxaccel",
                advance=lambda state, batch: (state, jnp.float32(next(drawn))),
                state=None,
                compile_seconds=1.0,
                peak_bytes=2**30,
            ), None

        monkeypatch.setattr(nemotron_train, "ours", ours)
        sizes = {"rounds": 2, "steps": 2, "before": before}
        files = [nemotron.TRAIN_PRESET], []
        found = nemotron_train.measure(*files, implementations=tuple(losses), **sizes)
        rows = {row["implementation"]: row for row in found}
        # No figure of a speed without one, under any name.
        for row in rows.values():
            assert ("rounds_ms" in row) == (row["ms"] is not None)
            assert (row.get("tokens_per_s") is None) == (row["ms"] is None)
        return rows

    return measure


def test_a_training_step_has_its_speed(trained):
    rows = trained(mosaic=(2.0, 1.5), xla=(2.001, 1.501))
    for row in rows.values():
        assert row["note"] == ""
        assert row["workload"] == "0.97 B parameters, 8 x 4096 tokens"
        assert row["tokens_per_s"] == pytest.approx(16e3 / row["ms"], rel=1e-2)
        assert len(row["rounds_ms"]) == 2


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ((2.1, 1.5), "by 5.0e-02 at first, by 0.0e+00 at last"),
        ((2.0, 1.65), "by 0.0e+00 at first, by 1.0e-01 at last"),
        ((np.nan, 1.5), "by nan at first"),
        ((2.0, np.nan), "by nan at last"),
    ],
)
def test_a_wrong_training_step_is_the_one_without_a_speed(trained, losses, note):
    rows = trained(mosaic=losses, xla=(2.0, 1.5))
    assert rows["xla"]["ms"] is not None
    assert rows["mosaic"]["ms"] is None
    assert rows["mosaic"]["note"].startswith("no speed: losses differ")
    assert note in rows["mosaic"]["note"]


def test_a_training_step_alone_is_held_against_an_earlier_call(trained):
    (before,) = trained(xla=(2.0, 1.5)).values()
    right = trained(mosaic=(2.0, 1.5), before=[before])["mosaic"]
    assert right["ms"] is not None
    wrong = trained(mosaic=(2.0, 1.65), before=[before])["mosaic"]
    assert "no speed: losses differ" in wrong["note"]
    # No row, of another number of steps, or of what is itself to be checked.
    others = {**before, "steps": 8}, {**before, "implementation": "mosaic"}
    for rows in ([], others, [{**before, "ms": None}]):
        alone = trained(mosaic=(2.0, 1.5), before=rows)["mosaic"]
        assert alone["note"].startswith("no speed: unchecked")
    rows = trained(mosaic=(2.0, 1.5), xla=None)
    assert rows["mosaic"]["note"].startswith("no speed: unchecked")
    assert rows["xla"]["note"] == "no speed: not available: of this width"
    assert trained(xla=(np.nan, 1.5))["xla"]["ms"] is None


def test_the_model_of_the_training_step_is_like_nano():
    experiment = load_experiment([str(nemotron.TRAIN_PRESET)])
    config = experiment.model.decoder()
    total = describe(config).total
    assert 0.9e9 < total.params < 1.1e9
    assert total.active_params < 0.5 * total.params
    nano = NemotronHConfig.published("nano").pattern
    assert nano.startswith(experiment.model.pattern)
    assert len(config.runs) == 1  # one period of layers is compiled


def test_rows_of_other_parts_stay(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    other = {"op": "a", "workload": "b", "implementation": "xla", "ms": 1.0}
    old = {**other, "op": "nemotron_decode"}
    path.write_text(json.dumps({"rows": [other, old]}))
    fresh = {**old, "ms": 2.0, "note": ""}
    monkeypatch.setattr(nemotron, "_rows", lambda *_: [fresh])
    assert benchmarks.main(["nemotron", "--parts=decode", f"--json={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["ms"] for row in rows] == [1.0, 2.0]
    wrong = {**fresh, "ms": None, "note": "no speed: x"}
    monkeypatch.setattr(nemotron, "_rows", lambda *_: [wrong])
    assert benchmarks.main(["nemotron", "--parts=decode", f"--json={path}"]) == 1
    for option in ("--parts=all", "--kinds=gdn", "--implementations=cuda"):
        with pytest.raises(ValueError, match="is unknown, allowed are"):
            benchmarks.main(["nemotron", option, f"--json={path}"])


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_has_the_kernels_that_are_required_of_it(batch):
    with hw.assume():
        model = nemotron_decode.with_ops(OF_KERNELS, "mosaic")
        args = (
            jax.eval_shape(model.init, jax.random.key(0)),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            jax.eval_shape(lambda: model.init_cache(batch, 128)),
        )
        traced = jax.jit(model.next_token).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    required = nemotron_decode.required_kernels(nemotron_decode.OPS, batch)
    assert len(required) == 2
    require_kernels(text, required)
    plain = nemotron_decode.with_ops(OF_KERNELS, "xla").config.implementation
    assert "expert_gemv" not in dict(plain)


@pytest.mark.gpu
def test_decoding_runs_the_kernels_on_the_card():
    rows = nemotron_decode.measure(
        OF_KERNELS,
        "small",
        implementation="mosaic",
        batches=(1, 3),
        sizes=nemotron_decode.Sizes(prompt=70, new=16, rounds=1),
        limits=bench.ceilings(),
    )
    for row in rows:
        assert row["ms"] is not None, row["note"]
        assert {"pk_expert_gemv", "pk_ssd_step"} <= set(row["kernels"])
        assert row["runs"]["ssd_step"].startswith("mosaic")

"""The decode waterfall tells no speed of another model, and no speed by accident."""

import dataclasses
import functools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from jaxaccel import benchmarks
from jaxaccel.benchmarks import decode, decode_programs, guards
from jaxaccel.config.gin_utils import ConfigError, load_config
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource, is_heldout
from jaxaccel.data.tokenizer import ByteTokenizer
from jaxaccel.decoding.waterfall import STEPS, DecodeBenchConfig, settings
from jaxaccel.models.decoder import Decoder, init_decoder
from jaxaccel.models.describe import describe
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from pallas_kernels._common import hw
from pallas_kernels._common.bench import ROOT, Ceilings
from pallas_kernels._common.dispatch import Choice


# Attention alone compiles soonest; the programs do not look into the mixers.
GIN = """
DecodeBenchConfig:
    model = @Qwen3_5TextConfig()
    batches = (2,)
    prompt_length = 5
    new_tokens = 4
    op_by_op_tokens = 1
    check_tokens = 4
    rounds = 1
    tokens_per_call = 2
    num_drafts = 2

Qwen3_5TextConfig:
    vocab_size = 64
    d_model = 16
    num_layers = 2
    pattern = ("attention",)
    num_heads = 2
    num_kv_heads = 1
    head_dim = 8
    gdn_key_heads = 1
    gdn_value_heads = 2
    gdn_key_dim = 8
    gdn_value_dim = 8
    d_ff = 16
    tie_embeddings = True
    num_mtp_layers = 1
    dtype = "float32"
"""


def tiny(**changes):
    sizes = {
        "model": Qwen3_5TextConfig.tiny(num_mtp_layers=1),
        "new_tokens": 4,
        "check_tokens": 4,
        "tokens_per_call": 2,
        "rounds": 1,
    }
    return DecodeBenchConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decode")
    (folder / "tiny.gin").write_text(GIN)
    out = folder / "rows.json"
    options = [f"--gin_file={folder / 'tiny.gin'}", f"--json={out}"]
    assert benchmarks.main(["decode", *options]) == 0
    return {r["implementation"]: r for r in json.loads(out.read_text())["rows"]}


def test_every_step_draws_the_same_tokens_and_has_a_speed(rows):
    assert tuple(rows) == STEPS
    for step in ("op_by_op", "jit", "scan", "in_place", "device_loop", "speculation"):
        row = rows[step]
        # There is no layer for what is named from "fused_kernel" on.
        named = STEPS.index(step) >= STEPS.index("fused_kernel")
        assert row["note"] == ("runs without gated_delta_step" if named else "")
        assert row["same_tokens"] == 1.0
        assert row["tokens_per_s"] == pytest.approx(2e3 / row["ms"], rel=1e-2)
        assert row["share_of_limit"] == pytest.approx(
            row["floor_ms"] / row["ms"], rel=1e-2
        )
        assert row["runs"]["attention"] == "xla"
    assert rows["op_by_op"]["times_first"] == 1.0
    assert sum(rows["speculation"]["accepted_histogram"]) > 0
    assert rows["in_place"]["temp_bytes"] < rows["scan"]["temp_bytes"]


@pytest.mark.gpu
def test_every_step_runs_on_the_card():
    model = Qwen3_5TextConfig(
        vocab_size=512,
        d_model=256,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        gdn_key_heads=2,
        gdn_value_heads=4,
        gdn_key_dim=128,
        gdn_value_dim=128,
        d_ff=256,
        num_mtp_layers=1,
        param_dtype="bfloat16",
    )
    config = tiny(
        model=model,
        batches=(3,),
        prompt_length=70,
        logit_tolerance=0.5,
        require=("pk_gated_delta_step",),
    )
    for row in decode.measure(config):
        assert row["ms"] is not None, row["note"]


def test_what_a_cpu_lacks_is_said_and_not_timed(rows):
    row = rows["command_buffers"]
    assert row["ms"] is None
    assert row["note"] == "not available: command buffers are CUDA graphs, this is cpu"
    assert "runs" not in row
    refused = decode_programs.refusals(tiny())
    assert set(refused) == {"command_buffers", "fused_kernel"}
    assert "Hopper" in refused["fused_kernel"]
    unknown = decode_programs.refusals(tiny(fused={"no_op": "mosaic"}))
    assert unknown["fused_kernel"] == "no layer has the op no_op"


def shapes_of(config):
    """Weights without values."""
    return shapes_of_model(config.model)


@functools.cache
def shapes_of_model(config):
    decoder = config.decoder()
    model = nnx.eval_shape(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))
    return decode_programs.Weights(config=decoder, state=nnx.split(model)[1])


def launch(tokens, text="", runs=None):
    return decode_programs.Launch(
        start=lambda: 0, run=lambda carry, count: tokens, runs=runs or {}, text=text
    )


def measured(monkeypatch, config, tokens, best=1.0, **about):
    """Rows of a step that draws `tokens` where zeros have the largest logits."""
    logits = np.zeros((1, 4, 8))
    logits[:, :, 0], logits[:, :, 1] = best, 0.99
    reference = np.zeros((1, 4), np.int32), logits
    drawn = np.asarray([tokens], np.int32)
    monkeypatch.setattr(decode, "ceilings", lambda: Ceilings(gbps=1.0, tflops=0.0))
    monkeypatch.setattr(decode.Weights, "random", shapes_of)
    monkeypatch.setattr(decode.Weights, "layers", ())
    monkeypatch.setattr(decode.Weights, "by_layer", {})
    moved = decode.Traffic(weights=1, state=1, kv=1)
    monkeypatch.setattr(decode, "traffic", lambda *_: moved)
    monkeypatch.setattr(decode, "refusals", lambda config: {})
    monkeypatch.setattr(decode, "prefill", lambda *_: None)
    monkeypatch.setattr(decode, "reference_tokens", lambda *_: reference)
    monkeypatch.setattr(
        decode,
        "build",
        lambda _, steps, *__: {s: launch(drawn, **about) for s in steps},
    )
    return list(decode.measure(config))


def refuse(*_):
    raise NotImplementedError("no card")


def test_other_tokens_have_no_speed(monkeypatch):
    config = tiny(steps=("jit",), batches=(1,))
    (row,) = measured(monkeypatch, config, [0, 0, 0, 0])
    assert row["ms"] > 0
    (row,) = measured(monkeypatch, config, [0, 1, 5, 5])  # a near tie, then others
    assert row["ms"] > 0
    assert row["same_tokens"] == 0.25
    (row,) = measured(monkeypatch, config, [0, 0, 0, 5])
    assert row["ms"] is None
    assert row["note"].startswith("no speed: other tokens")
    # Every step agrees on the argmax of NaN.
    rows = measured(monkeypatch, config, [0, 0, 0, 0], best=np.nan)
    assert [row["ms"] for row in rows] == [None]
    assert rows[0]["note"] == "no speed: the first step's logits are not finite"


def test_steps_that_are_compiled_otherwise_share_their_program():
    names = ("jit", "in_place", "device_loop", "command_buffers", "speculation")
    plan = settings(tiny(steps=names, batches=(1,)), {})
    programs = [decode.same_program(step) for step in plan]
    assert programs[2] == programs[3]
    assert len(set(programs)) == len(plan) - 1


def test_a_program_is_lowered_once_and_compiled_for_each_step():
    config = tiny(steps=("jit", "device_loop", "command_buffers"), batches=(2,))
    steps = settings(config, {})[1:]
    traced = []

    @jax.jit
    def program(x):
        traced.append(x)
        return x + 1

    def compiled(config):
        made = decode_programs._compile(
            *(config, steps, lambda call, about: call), *(program, jnp.ones(2))
        )
        assert list(made) == list(steps)
        return made.values()

    assert [call(jnp.ones(2))[0] for call in compiled(config)] == [2, 2]
    assert len(traced) == 1
    # A step that cannot be compiled takes nothing from the others.
    broken = dataclasses.replace(config, command_buffers="NONE_SUCH")
    kinds = [isinstance(found, Exception) for found in compiled(broken)]
    assert kinds == [False, True]


def test_a_step_without_a_required_kernel_has_no_speed(monkeypatch):
    steps = ("jit", "fused_kernel", "in_place")
    config = tiny(steps=steps, batches=(1,), require=("pk_x",))
    rows = measured(monkeypatch, config, [0] * 4)
    assert [row["ms"] is None for row in rows] == [False, True, True]
    assert all("not in the program: pk_x" in row["note"] for row in rows[1:])
    text = 'custom-call(), custom_call_target="mosaic_gpu_v2", op_name="f/pk_x/g"'
    rows = measured(monkeypatch, config, [0] * 4, text=text)
    assert all(row["ms"] > 0 for row in rows)
    assert rows[2]["kernels"] == ["pk_x"]
    plan = settings(config, {"fused_kernel": "no card"})
    assert [step.needs_kernels for step in plan] == [False, True, True]
    # A kernel that refuses is an answer only where nobody asked for it.
    monkeypatch.setattr(decode, "build", refuse)
    rows = list(decode.measure(config))
    verdicts = ["not available", "no speed", "no speed"]
    assert [row["note"] for row in rows] == [f"{v}: no card" for v in verdicts]
    free = list(decode.measure(dataclasses.replace(config, require=())))
    assert {row["note"] for row in free} == {"not available: no card"}
    # Drafts are verified several at once, which is no work for a step's kernel.
    assert not settings(tiny(require=("pk_x",)), {})[-1].needs_kernels


def test_a_near_tie_is_told_from_a_wrong_token():
    logits = np.zeros((2, 3, 4))
    logits[:, :, 0], logits[:, :, 1], logits[:, :, 2] = 1.0, 0.99, -1.0
    expected = np.zeros((2, 3), np.int32)
    same = decode.compare(expected, logits, expected)
    assert (same.same, same.gap) == (1.0, 0.0)
    tie = expected.copy()
    tie[1, 1:] = [1, 3]  # behind the first difference rows are other texts
    found = decode.compare(expected, logits, tie)
    assert found.same == pytest.approx(4 / 6)
    assert found.gap == pytest.approx(0.01 / logits[0, 0].std())
    tie[0, 0] = 2
    assert decode.compare(expected, logits, tie).gap > 1.0
    for broken in (np.nan, np.inf, -np.inf):
        logits[1, 1, 3] = broken
        assert decode.compare(expected, logits, tie).gap == np.inf


def test_a_loop_in_python_refuses_layers_that_it_would_skip():
    config = NemotronHConfig.published("nano").decoder()
    assert len(config.runs) > 1
    weights = types.SimpleNamespace(config=config, layout=lambda step: (None, None))
    (step,) = (s for s in settings(tiny(), {}) if s.step == "jit")
    with pytest.raises(ValueError, match=f"the model has {len(config.runs)} runs"):
        decode_programs._reader(weights, step)


def test_a_step_left_out_changes_nothing_behind_it():
    config = tiny(steps=("jit", "in_place", "device_loop"), layers="scanned")
    jit, in_place, loop = settings(config, {})
    assert (jit.jit, jit.layers, jit.donate) == (True, "python", False)
    assert (in_place.layers, in_place.donate, in_place.fused) == ("scanned", True, ())
    assert (loop.tokens_per_call, loop.num_drafts) == (2, 0)
    whole = settings(tiny(), {"fused_kernel": "no card"})
    assert [step.step for step in whole] == list(STEPS)
    assert whole[3].unavailable == "no card"
    assert whole[4].fused == ()
    assert settings(tiny(), {})[-1].fused == (("gated_delta_step", "mosaic"),)


def test_traffic_is_what_a_token_must_move():
    def moved(batch, **changes):
        model = Qwen3_5TextConfig.tiny(num_mtp_layers=1, **changes)
        weights = shapes_of(tiny(model=model))
        return decode.traffic(weights, batch, context=10), weights.config

    (one, decoder), (two, _) = moved(1), moved(2)
    cost = describe(decoder).trunk
    assert one.state == 2 * cost.state_bytes
    assert two.state == 2 * one.state
    assert one.kv == 11 * cost.kv_bytes_per_token
    assert one.weights == 4 * cost.active_params
    assert two.weights - one.weights == decoder.d_model * 4  # a looked up row each
    tied, decoder = moved(1, tie_embeddings=True)
    assert tied.weights == 4 * describe(decoder).trunk.active_params


def test_kernels_are_found_where_they_run_and_nowhere_else():
    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((256,), jnp.float32)

    def lowered(implementation):
        @jax.named_scope("pk_rms_norm_fwd")
        def norm(x, scale):
            return pallas_kernels.rms_norm(x, scale, implementation=implementation)

        with hw.assume():
            traced = jax.jit(norm).trace(x, scale)
            low = traced.lower(lowering_platforms=("cuda",))
        return low.as_text(debug_info=True)

    guards.require_kernels(lowered("mosaic"), ["pk_rms_norm_fwd"])
    with pytest.raises(guards.KernelMissing, match=r"pk_x; in it: pk_rms_norm_fwd"):
        guards.require_kernels(lowered("mosaic"), ["pk_rms_norm_fwd", "pk_x"])
    with pytest.raises(guards.KernelMissing, match="pk_rms_norm_fwd; in it: none"):
        guards.require_kernels(lowered("xla"), ["pk_rms_norm_fwd"])
    compiled = (
        '%x = bf16[8] custom-call(%a), custom_call_target="mosaic_gpu_v2", '
        'metadata={op_name="jit(f)/pk_gdn_fwd/mpmd_map"}'
    )
    assert guards.kernels_in(compiled) == {"pk_gdn_fwd"}


def test_the_implementations_of_a_run_are_told_once():
    choices = [
        Choice(op="b", implementation="xla"),
        Choice(op="a", implementation="mosaic", config="Config(x=1)"),
        Choice(op="b", implementation="reference"),
        Choice(op="b", implementation="xla"),
    ]
    assert guards.implementations_used(choices) == {
        "a": "mosaic Config(x=1)",
        "b": "xla, reference",
    }


def test_weights_of_a_run_continue_text_that_it_never_read(monkeypatch):
    model = Qwen3_5TextConfig.tiny(vocab_size=260)
    config = tiny(model=model, checkpoint="runs/x", steps=("jit",), prompt_length=40)
    decoder = dataclasses.replace(model.decoder(), param_dtype="float32")
    trained = init_decoder(decoder, 3), ByteTokenizer()
    texts = {f"{i}": f"{i}" * (30 + i) for i in range(40)}
    source = InMemorySource(texts=tuple(texts.values()), names=tuple(texts))
    data = DataConfig(sources=(source,), heldout_fraction=0.5)
    files = []
    run = types.SimpleNamespace(data=data)
    monkeypatch.setattr(decode_programs, "load_checkpoint_model", lambda _: trained)
    monkeypatch.setattr(decode_programs, "find_checkpoint", pathlib.Path)
    monkeypatch.setattr(
        decode_programs, "load_experiment", lambda names: files.extend(names) or run
    )
    config = dataclasses.replace(
        config, model=dataclasses.replace(model, param_dtype="bfloat16")
    )
    weights = decode_programs.Weights.trained(config)
    assert files == [pathlib.Path("runs/x/config.gin")]
    dtypes = [x.dtype for x in jax.tree.leaves(weights.state)]
    assert dtypes == [x.dtype for x in jax.tree.leaves(shapes_of(config).state)]
    assert dtypes != [x.dtype for x in jax.tree.leaves(nnx.split(trained[0])[1])]
    prompts = [
        ByteTokenizer().decode(x) for x in np.asarray(weights.prompts(config, 3))
    ]
    held_out = [x for x in texts if is_heldout(x, 0.5) and len(texts[x]) >= 40]
    assert prompts == [texts[x][:40] for x in held_out[:3]]
    with pytest.raises(ValueError, match="0 held-out texts have prompt_length=1000"):
        weights.prompts(dataclasses.replace(config, prompt_length=1000), 1)
    other = dataclasses.replace(config.model, rope_theta=7.0)
    with pytest.raises(ValueError, match=r"runs/x is of another model: its attention"):
        decode_programs.Weights.trained(dataclasses.replace(config, model=other))


def test_what_was_named_and_did_not_run_is_said(monkeypatch):
    steps = ("jit", "fused_kernel")
    fused = {"gemv": "mosaic", "gated_delta_step": "mosaic"}
    config = tiny(steps=steps, batches=(1,), fused=fused)
    runs = {"gated_delta_step": "mosaic Config(x=1, y=2)", "gemv": "xla"}
    monkeypatch.setattr(decode, "_time", lambda *_: [1.0])
    rows = measured(monkeypatch, config, [0] * 4, runs=runs)
    assert [row["note"] for row in rows] == ["", "runs without gemv"]
    assert rows[1]["ms"] == 1.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": ("scan", "jit")}, "in this order"),
        ({"steps": ("op_by_op", "scan")}, "need 'jit'"),
        ({"steps": ()}, "at least one"),
        ({"new_tokens": 3}, "multiple of"),
        ({"layers": "copied"}, "layers='copied'"),
        ({"batches": ()}, "batches"),
        ({"model": Qwen3_5TextConfig.tiny()}, "num_mtp_layers=1"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_the_published_configuration_is_what_it_says():
    path = ROOT / "experiments" / "gdn" / "decode.gin"
    config = load_config("DecodeBenchConfig", [path])
    decoder = config.model.decoder()
    assert decoder.layer_types.count("gdn") == 3 * decoder.layer_types.count(
        "attention"
    )
    assert config.batches == (1, 8, 64)
    assert config.steps == STEPS
    assert config.require == ("pk_gated_delta_step",)
    with pytest.raises(ConfigError, match="nothing uses it"):
        load_config("DecodeBenchConfig", [path], ["TrainConfig.num_steps = 1"])


def test_the_experiments_kernels_take_its_sizes():
    """On the card; what a step needs is asked with as many slots as it will have."""
    config = load_config(
        "DecodeBenchConfig", [str(ROOT / "experiments/gdn/decode.gin")]
    )
    config = dataclasses.replace(config, batches=(1,))
    with hw.assume():
        found = decode_programs.refusals(config)
        assert "fused_kernel" not in found
        short = dataclasses.replace(
            config, prompt_length=1, new_tokens=1, tokens_per_call=1, check_tokens=1
        )
        short = dataclasses.replace(short, op_by_op_tokens=1)
        assert (
            "the kernel has at least 64"
            in decode_programs.refusals(short)["fused_kernel"]
        )

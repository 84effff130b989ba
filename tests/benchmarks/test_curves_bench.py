"""Loss curves of several implementations, held against the noise of seeds."""

import dataclasses
import json

import pytest

from jaxaccel.benchmarks import curves
from pallas_kernels._common.bench import ROOT


def a_run(variant, seed, losses):
    return curves.Run(
        variant=variant,
        seed=seed,
        curves={"step": list(range(len(losses))), "nats_per_token": losses},
        heldout=1.0,
        tokens_per_s=10.0,
        runs={"attention": variant},
    )


def test_a_variant_is_held_against_the_distance_of_seeds():
    base = a_run("kernels", 0, [9.0, 5.0, 4.0, 3.0])
    seed = a_run("kernels", 1, [8.0, 5.0, 4.2, 3.2])
    near = a_run("xla", 0, [1.0, 1.0, 4.1, 3.1])  # only the last half counts
    far = a_run("other", 0, [9.0, 5.0, 4.0, 3.5])
    rows = curves.summarise([base, seed, near, far], "w")
    assert [row["within_noise"] for row in rows] == [None, None, True, False]
    assert rows[2]["apart"] == pytest.approx(0.1)
    assert rows[2]["noise"] == pytest.approx(0.2)
    assert [row["tokens_per_s"] for row in rows] == [10.0, 10.0, 10.0, None]
    assert rows[0]["apart"] is None
    alone = curves.summarise([base, near], "w")
    assert alone[1]["noise"] is None
    assert alone[1]["within_noise"] is None
    same = dataclasses.replace(near, runs=base.runs)
    with pytest.raises(ValueError, match="'kernels' and 'xla' ran the same"):
        curves.summarise([base, same], "w")
    later = dataclasses.replace(near, curves={"step": [1], "nats_per_token": [1.0]})
    with pytest.raises(ValueError, match="logged other steps"):
        curves.summarise([base, later], "w")


def test_variants_have_names_and_bindings():
    assert curves.parse_variant("kernels=") == ("kernels", [])
    text = 'xla=A.b = {"x": "xla"}; C.d = 1'
    assert curves.parse_variant(text) == ("xla", ['A.b = {"x": "xla"}', "C.d = 1"])
    for wrong in ("xla", "=A.b = 1"):
        with pytest.raises(ValueError, match="expected NAME=BINDING"):
            curves.parse_variant(wrong)


BASE = ROOT / "experiments" / "base"
TINY = f"""
include "{BASE}/optim.gin"
include "{BASE}/run.gin"
NUM_STEPS = 4
PEAK_LR = 1e-2
WARMUP_STEPS = 1
Experiment.data = @DataConfig()
Experiment.model = @Qwen3_5TextConfig()
DataConfig.sources = [@InMemorySource()]
InMemorySource.texts = %TEXTS
TEXTS = ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi",
         "omicron pi rho sigma tau upsilon phi chi psi omega alpha beta gamma delta",
         "one two three four five six seven eight nine ten eleven twelve thirteen")
DataConfig.tokenizer = "byte"
DataConfig.vocab_size = 300
DataConfig.seq_len = 32
DataConfig.batch_size = 2
Qwen3_5TextConfig:
    vocab_size = 300
    d_model = 16
    d_ff = 16
    num_layers = 1
    pattern = ("attention",)
    num_heads = 2
    num_kv_heads = 1
    head_dim = 8
    gdn_key_heads = 1
    gdn_value_heads = 1
    gdn_key_dim = 8
    gdn_value_dim = 8
TrainConfig:
    log_every = 1
    loss_chunk = 32
"""


def test_the_command_writes_curves_of_each_run(tmp_path):
    gin = tmp_path / "tiny.gin"
    gin.write_text(TINY)
    out = tmp_path / "curves.json"
    variant = 'Qwen3_5TextConfig.implementation = {"rms_norm": "reference"}'
    arguments = [f"--gin_file={gin}", "--seeds=0", f"--json={out}"]
    arguments.append("--variant=picked=")
    assert curves.main([*arguments, f"--variant=reference={variant}"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["implementation"], row["seed"]) for row in rows] == [
        ("picked", 0),
        ("reference", 0),
    ]
    assert rows[1]["apart"] < 1e-3  # another form of one op is a rounding apart
    assert rows[0]["curves"]["step"] == [1, 2, 3, 4]
    assert len(rows[0]["curves"]["nats_per_token"]) == 4

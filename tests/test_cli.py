"""The commands: what they print, what they write, and how they end on mistakes."""

import dataclasses
import logging
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from flax import nnx

from jaxaccel import cli
from jaxaccel.config import load_experiment
from jaxaccel.config.registry import SampleConfig
from jaxaccel.data.tokenizer import ByteTokenizer
from jaxaccel.models.decoder import Decoder
from jaxaccel.training.checkpoint import CheckpointExtras, save_checkpoint
from jaxaccel.training.optim import make_optimizer
from jaxaccel.training.step import make_init


TINY = pathlib.Path(__file__).parents[1] / "experiments" / "gdn" / "tiny.gin"

SMALL = """
Experiment:
    model = @Qwen3_5TextConfig()
    data = @DataConfig()
    train = @TrainConfig()
    sample = @SampleConfig()
Qwen3_5TextConfig:
    vocab_size = 259
    d_model = 16
    num_layers = 1
    pattern = ("attention",)
    num_heads = 1
    num_kv_heads = 1
    head_dim = 8
    gdn_key_heads = 1
    gdn_value_heads = 1
    gdn_key_dim = 8
    gdn_value_dim = 8
    d_ff = 16
    dtype = "float32"
DataConfig:
    sources = [@InMemorySource()]
    tokenizer = "byte"
    seq_len = 16
    batch_size = 2
InMemorySource.texts = ["some text", "some more text"]
TrainConfig.num_steps = 2
SampleConfig.max_new_tokens = 4
"""


@pytest.fixture
def gin_file(tmp_path):
    path = tmp_path / "small.gin"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A work folder with the checkpoint of a model that has learned nothing."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.gin").write_text(SMALL)
    experiment = load_experiment([folder / "small.gin"])
    config, decoder = experiment.train, experiment.model.decoder()

    def build(key):
        return Decoder(decoder, rngs=nnx.Rngs(key))

    init = make_init(build, make_optimizer(config.optim, 200), config)
    extras = CheckpointExtras(
        model_config=decoder, tokenizer=ByteTokenizer(), data_state={}
    )
    save_checkpoint(folder / "checkpoints", jax.jit(init)(), extras)
    return folder


def fails(capsys, *argv, status=2):
    """Runs a command that must fail; returns the one line it says."""
    assert cli.main([str(word) for word in argv]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxaccel: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_help_and_mistyped_options_cost_no_heavy_import():
    program = (
        "import sys, jaxaccel.cli\n"
        "try: jaxaccel.cli.main(sys.argv[1:])\n"
        "except SystemExit as end: status = end.code\n"
        "print(status, [m for m in ('jax', 'gin', 'numpy') if m in sys.modules])"
    )
    for argv, status in ((["train", "--help"], 0), (["train", "--gin_fil=x"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, *argv], capture_output=True, text=True
        )
        assert done.stdout.splitlines()[-1] == f"{status} []"


def test_describe_tells_size_and_costs(capsys, checkpoint):
    assert cli.main(["describe", f"--gin_file={TINY}"]) == 0
    assert "active a token" in capsys.readouterr().out
    assert cli.main(["describe", f"--checkpoint={checkpoint}", "--seq_len=8"]) == 0
    printed = capsys.readouterr().out
    assert "layer 0: attention + mlp" in printed
    assert "at 8 tokens" in printed


def test_logging_of_the_caller_is_left_as_it_was(capsys, gin_file):
    loggers = [logging.getLogger(name) for name in ("jaxaccel", "pallas_kernels")]
    mine = logging.NullHandler()
    loggers[0].addHandler(mine)
    before = [(log.level, list(log.handlers), log.propagate) for log in loggers]
    try:
        assert cli.main(["describe", f"--gin_file={gin_file}"]) == 0
        assert cli.main(["describe", "--gin_file=not_there.gin"]) == 2
        after = [(log.level, list(log.handlers), log.propagate) for log in loggers]
        assert after == before
    finally:
        loggers[0].removeHandler(mine)


def test_describe_refuses_what_it_would_not_heed(capsys, checkpoint, gin_file):
    of_run = ["describe", f"--checkpoint={checkpoint}"]
    for option in (
        "--gin.TrainConfig.num_step=3",
        "--gin_bindings=TrainConfig.num_steps = 3",
        f"--gin_file={gin_file}",
        "--gin_search_paths=x",
    ):
        assert option in fails(capsys, *of_run, option)
    for source in (of_run, ["describe", f"--gin_file={gin_file}"]):
        for length in (0, -3):
            message = fails(capsys, *source, f"--seq_len={length}")
            assert f"--seq_len={length} is less than 1" in message
    assert "either" in fails(capsys, "describe", "--gin.TrainConfig.num_steps=3")


def test_bindings_reach_the_model(capsys, gin_file):
    argv = ["describe", f"--gin_file={gin_file}"]
    name = "Qwen3_5TextConfig.num_layers"
    told = []
    for more in ([], [f"--gin_bindings={name}=2"], [f"--gin_param={name} = 2"]):
        assert cli.main([*argv, *more]) == 0
        told.append(capsys.readouterr().out)
    assert cli.main([*argv, f"--gin.{name}=2"]) == 0
    told.append(capsys.readouterr().out)
    assert told[0] != told[1] == told[2] == told[3]


def test_generate_continues_prompts(capsys, checkpoint):
    argv = ["generate", f"--checkpoint={checkpoint}", "--max_new_tokens=4", "--seed=3"]
    assert cli.main([*argv, "--prompt=ab"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith("ab")
    assert cli.main([*argv, "--prompt=ab", "--stream"]) == 0
    assert capsys.readouterr().out == whole


def test_generate_keeps_what_a_plan_says(capsys, checkpoint, gin_file):
    argv = ["generate", f"--checkpoint={checkpoint}", "--max_new_tokens=4", "--seed=3"]
    argv += ["--prompt=some text that is longer than a window"]
    window = "StreamingCacheConfig.window"
    short = ["@StreamingCacheConfig()", f"--gin.{window}=1"]
    short.append("--gin.StreamingCacheConfig.num_sinks=0")
    # Of a whole experiment the plan is taken, the rest is not heeded.
    file = [f"--gin_file={gin_file}", "--gin.SampleConfig.cache=@CachePlanConfig()"]
    plan = "--gin.CachePlanConfig.policy="
    outputs = []
    for more in ([f"{plan}@DenseCacheConfig()"], file, [plan + short[0], *short[1:]]):
        assert cli.main([*argv, *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    message = fails(capsys, *argv, file[0])
    assert "no SampleConfig.cache is set there" in message
    message = fails(capsys, *argv, "--gin.CachePlanConfig.capacity=20")
    assert "capacity=20" in message


def test_generate_refuses_bad_input(capsys, checkpoint, tmp_path):
    command = ["generate", "--checkpoint", checkpoint]
    assert "top_p=2.0" in fails(capsys, *command, "--top_p=2")
    assert "--max_new_tokens=0" in fails(capsys, *command, "--max_new_tokens=0")
    assert "--stream" in fails(capsys, *command, "--stream", "--prompt=a", "--prompt=b")
    prompt = os.fsdecode(b"--prompt=ab\xff\xfe")
    assert r"--prompt: b'ab\xff\xfe' is not UTF-8" in fails(capsys, *command, prompt)
    message = fails(capsys, "generate", "--checkpoint", tmp_path / "none")
    assert "no complete checkpoint" in message


def test_mistakes_in_the_config_end_with_one_line(capsys, gin_file, tmp_path):
    train = ["train", f"--workdir={tmp_path / 'run'}"]
    file = f"--gin_file={gin_file}"
    message = fails(capsys, *train, file, "--gin.TrainConfig.num_step=3")
    assert "TrainConfig has no setting 'num_step'; did you mean 'num_steps'" in message
    message = fails(capsys, *train, file, "--gin.TrainConfig.num_steps='3'")
    assert "expected int, got str '3'" in message
    message = fails(capsys, *train, file, "--gin_bindings=MeshConfig.data = 1")
    assert "MeshConfig.data is set but nothing uses it" in message
    assert "no.gin not found" in fails(capsys, *train, "--gin_file=no.gin")
    assert "give --gin_file" in fails(capsys, *train)
    assert not (tmp_path / "run").exists()


def test_a_run_shorter_than_its_warm_up_is_refused(capsys, gin_file, tmp_path):
    argv = ["train", f"--gin_file={gin_file}", f"--workdir={tmp_path / 'run'}"]
    message = fails(capsys, *argv, "--gin.TrainConfig.num_steps=2")
    assert "warmup_steps is 100, the run has 2 steps" in message


def test_default_prompts_end_where_a_token_may():
    assert all(p and p == p.rstrip() for p in SampleConfig().prompts)


def test_debug_shows_where(gin_file):
    arguments = [f"--gin_file={gin_file}", "--gin.TrainConfig.num_step=3"]
    with pytest.raises(ValueError, match="num_step"):
        cli.main(["train", "--debug", "--workdir=x", *arguments])


def test_a_wrong_workdir_is_told(capsys, gin_file, tmp_path):
    train = ["train", f"--gin_file={gin_file}"]
    assert "is a file" in fails(capsys, *train, f"--workdir={gin_file}")
    resume = f"--workdir={tmp_path / 'none'}"
    assert "no run to resume" in fails(capsys, "train", "--resume", resume)
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "old" / "config.gin").write_text("# of the old run\n")
    message = fails(capsys, *train, f"--workdir={tmp_path / 'old'}")
    assert "holds a run already" in message
    assert (tmp_path / "old" / "config.gin").read_text() == "# of the old run\n"


@pytest.mark.parametrize("steps", ["10", "15:10", "a:b"])
def test_profile_steps_are_checked(capsys, steps):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--workdir=x", f"--profile_steps={steps}"])
    assert end.value.code == 2
    assert "expected FIRST:END" in capsys.readouterr().err


def test_train_hands_on_everything_and_writes_its_config(
    capsys, gin_file, tmp_path, monkeypatch
):
    from jaxaccel.training import loop

    calls = []

    def fake(config, model, data, workdir, **options):
        calls.append((config, model, data, options))
        ended = len(calls) == 2
        return dataclasses.make_dataclass("Result", ["interrupted"])(ended)

    monkeypatch.setattr(loop, "train", fake)
    run = tmp_path / "run"
    argv = ["train", f"--gin_file={gin_file}", f"--workdir={run}"]
    assert cli.main([*argv, "--profile_steps=1:2", "--tensorboard"]) == 0
    config, model, data, options = calls[0]
    assert config.tensorboard
    assert options["profile_steps"] == (1, 2)
    assert options["config_text"] == (run / "config.gin").read_text()
    written = load_experiment([run / "config.gin"])
    assert (written.train, written.model, written.data) == (config, model, data)
    assert "TrainConfig.num_steps = 2" in (run / "config_sources.txt").read_text()
    # Without a gin file, resuming takes what the run wrote; SIGTERM ends it with 143.
    assert cli.main(["train", "--resume", f"--workdir={run}"]) == 143
    assert calls[1][:3] == calls[0][:3]
    assert calls[1][3]["resume"]


def test_report_writes_a_page_or_says_why_not(capsys, tmp_path):
    run = tmp_path / "run"
    assert "no run folder" in fails(capsys, "report", run)
    run.mkdir()
    row = '{"kind": "eval", "step": 0, "time": 1.0, "nats_per_byte": 2.0}\n'
    (run / "metrics.jsonl").write_text(row)
    out = tmp_path / "report.html"
    assert cli.main(["report", str(run), f"--out={out}"]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")


def test_an_assignment_needs_a_value(capsys):
    with pytest.raises(SystemExit, match="needs a value"):
        cli.main(["describe", "--gin.TrainConfig.num_steps"])

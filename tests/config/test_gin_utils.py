"""Experiments from gin files: what they build, and what mistakes are told as."""

import dataclasses
import pathlib

import gin
import pytest

from jaxaccel.config import (
    ConfigError,
    Experiment,
    experiment_text,
    load_experiment,
)
from jaxaccel.config.gin_utils import read_experiment
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.models.qwen3_next import Qwen3NextConfig
from jaxaccel.training.config import OptimConfig, TrainConfig


EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
# Files of training runs; those of benchmarks build another root and are tested there.
FILES = sorted(
    p for p in EXPERIMENTS.glob("*/*.gin") if "BenchConfig:" not in p.read_text()
)

BASE = """
STEPS = 7
OptimConfig.peak_lr = 1
TrainConfig:
    optim = @OptimConfig()
    num_steps = %STEPS
"""

MAIN = """
include "base.gin"
Experiment:
    model = @Qwen3NextConfig()
    data = @DataConfig()
    train = @TrainConfig()
DataConfig:
    sources = [@a/InMemorySource(), @b/InMemorySource()]
    weights = [1, 2.5]
a/InMemorySource.texts = ["first"]
b/InMemorySource.texts = ["second", "third"]
InMemorySource.min_chars = 2
Qwen3NextConfig:
    vocab_size = 128
    d_model = 32
    num_layers = 4
    num_heads = 2
    num_kv_heads = 1
    head_dim = 16
    gdn_key_heads = 1
    gdn_value_heads = 2
    gdn_key_dim = 16
    gdn_value_dim = 16
    num_experts = 4
    experts_per_token = 2
    d_expert = 16
    d_shared_expert = 16
    rope_theta = 10_000
    dtype = "float32"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two files, and with gin's global table untouched afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.gin").write_text(BASE)
    (tmp_path / "main.gin").write_text(MAIN)
    yield tmp_path
    assert gin.config_str().strip() == ""
    assert not gin.config_is_locked()


def load(text="", *bindings, **options):
    """Loads the main file with statements added to it, from line 2 of `more.gin`."""
    pathlib.Path("more.gin").write_text(f'include "main.gin"\n{text}')
    return load_experiment(["more.gin"], bindings, **options)


def test_files_build_frozen_configs(folder):
    experiment = load()
    assert type(experiment) is Experiment
    assert experiment.model == Qwen3NextConfig.tiny()
    assert type(experiment.model) is Qwen3NextConfig
    assert experiment.train == TrainConfig(num_steps=7, optim=OptimConfig(peak_lr=1.0))
    assert isinstance(experiment.train.optim.peak_lr, float)
    assert experiment.data.weights == (1.0, 2.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.train.num_steps = 3


def test_scopes_hold_different_settings_and_inherit_the_rest(folder):
    first, second = load().data.sources
    assert first == InMemorySource(texts=("first",), min_chars=2)
    assert second == InMemorySource(texts=("second", "third"), min_chars=2)


def test_later_settings_override_and_direct_calls_are_not_altered(folder):
    assert load("STEPS = 8").train.num_steps == 8
    assert load("STEPS = 8", "STEPS = 9").train.num_steps == 9
    assert load("", assignments=["STEPS=10"]).train.num_steps == 10
    assert TrainConfig().num_steps == TrainConfig.num_steps
    assert load().train.num_steps == 7


def test_a_macro_whose_setting_is_overridden_counts_as_used(folder):
    assert load("", "TrainConfig.num_steps = 9").train.num_steps == 9
    assert load("", assignments=["TrainConfig.num_steps=9"]).train.num_steps == 9
    assert load("TrainConfig.num_steps = 9").train.num_steps == 9
    # Also through another macro, and where the macro itself is overridden.
    chain = "MORE = 3\nSTEPS = %MORE"
    assert load(chain, "TrainConfig.num_steps = 9").train.num_steps == 9
    assert load(chain, "STEPS = 9").train.num_steps == 9
    inside = "SEED = 3\nDataConfig.weights = [%SEED, 1]"
    assert load(inside, "DataConfig.weights = [1, 1]").data.weights == (1, 1)
    # One that no setting ever referred to is still a mistake.
    with pytest.raises(ConfigError, match="SPARE is set but nothing uses it"):
        load("SPARE = 3", "TrainConfig.num_steps = 9")
    with pytest.raises(ConfigError, match="LOOP is set but nothing uses it"):
        load("LOOP = %LOOP", "TrainConfig.num_steps = 9")


def test_an_include_is_found_beside_its_file_and_in_search_paths(folder, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "inner.gin").write_text('include "../main.gin"\n')
    assert load_experiment(["sub/inner.gin"]).train.num_steps == 7
    found = load_experiment(["inner.gin"], search_paths=["nowhere", "sub"])
    assert found.train.num_steps == 7


def test_assignments_take_bare_words_where_a_string_is_wanted(folder):
    data = load("", assignments=["DataConfig.tokenizer=my files/tok.json"]).data
    assert data.tokenizer == "my files/tok.json"
    with pytest.raises(ConfigError, match="'abc' is no value"):
        load("", assignments=["DataConfig.seq_len=abc"])
    with pytest.raises(ConfigError, match="did you mean 'tokenizer'"):
        load("", assignments=["DataConfig.tokeniser=abc"])


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "TrainConfig.num_stesp = 5",
            "2: TrainConfig has no setting 'num_stesp'; did ",
        ),
        (
            "\nTrainConfg.num_steps = 5",
            "3: nothing is named 'TrainConfg'; did you mean",
        ),
        (
            "TrainConfig.num_steps = '5'",
            "2: TrainConfig.num_steps: expected int, got s",
        ),
        (
            "TrainConfig.num_steps = True",
            "2: TrainConfig.num_steps: expected int, got b",
        ),
        (
            "TrainConfig.num_steps = 5.0",
            "2: TrainConfig.num_steps: expected int, got f",
        ),
        ("TrainConfig.num_steps = 0", "2: TrainConfig: num_steps is 0"),
        ("TrainConfig.num_steps = five", "2: 'five' is no value"),
        ("TrainConfig.num_steps 5", "2: Couldn't parse statement"),
        ("TrainConfig.num_steps = (5", "unexpected EOF"),
        (
            "TrainConfig:\n    seed = 1\n    sead = 1",
            "4: TrainConfig has no setting 'sea",
        ),
        (
            "TrainConfig.num_steps = %STEP",
            "2: macro %STEP is not defined; did you mean",
        ),
        ("STEPS = %A\nA = %STEPS", "macro %STEPS refers to itself"),
        ("TrainConfig.num_steps = %gin.REQUIRED", "2: this setting is required"),
        ("TrainConfig.optim = @OptmConfig()", "2: nothing is named 'OptmConfig'"),
        (
            "TrainConfig.optim = @OptimConfig",
            "2: TrainConfig.optim: expected OptimConf",
        ),
        (
            "Experiment.model = @OptimConfig()",
            "2: Experiment.model: expected ModelConf",
        ),
        ("SEQ = 5", "2: SEQ is set but nothing uses it"),
        ("MeshConfig.data = 1", "2: MeshConfig.data is set but nothing uses it"),
        ("c/InMemorySource.min_chars = 1", "2: c/InMemorySource.min_chars is set but"),
        (
            "DataConfig.seed = 1\nDataConfig.seed = 2",
            "3: DataConfig.seed is set twice, fi",
        ),
        (
            "DataConfig.sources = [@InMemorySource()]",
            "2: InMemorySource.texts must be s",
        ),
        ("import jaxaccel.missing", "2: No module named 'jaxaccel.missing'"),
        ("from __gin__ import dynamic_registration", "2: dynamic registration"),
        ("include 'more.gin'", "2: a file includes itself: more.gin -> more"),
    ],
)
def test_mistakes_are_told_with_file_and_line(folder, text, message):
    with pytest.raises(ConfigError) as error:
        load(text)
    assert str(error.value).startswith("more.gin:")
    assert message in str(error.value)


def test_mistakes_on_the_command_line_name_the_option(folder):
    with pytest.raises(ConfigError, match=r"^--gin_bindings TrainConfig.nun_steps=1: "):
        load("", "TrainConfig.nun_steps=1")
    with pytest.raises(ConfigError, match=r"^--gin.DataConfig.seed=x: "):
        load("", assignments=["DataConfig.seed=x"])
    with pytest.raises(ConfigError, match="is set twice"):
        load("", "STEPS = 1", "STEPS = 2")


def test_missing_files_are_told_with_where_they_were_looked_for(folder):
    with pytest.raises(FileNotFoundError, match=r"gin file no\.gin not found"):
        load_experiment(["no.gin"])
    with pytest.raises(FileNotFoundError, match=r"more.gin:2: gin file no.gin not"):
        load('include "no.gin"')


def test_an_experiment_needs_its_parts(folder):
    with pytest.raises(ConfigError, match=r"Experiment.model, .* must be set"):
        load_experiment([])


def test_the_written_config_gives_an_equal_experiment(folder):
    loaded = read_experiment(["main.gin"], ["DataConfig.tokenizer = 'it\\'s \"new\"'"])
    text = experiment_text(loaded.experiment, header="two\nlines")
    pathlib.Path("config.gin").write_text(text)
    assert text.startswith("# two\n# lines\n")
    again = load_experiment(["config.gin"])
    assert again == loaded.experiment
    assert experiment_text(again, header="two\nlines") == text


def test_a_value_without_a_spelling_is_named(folder):
    experiment = load()
    data = dataclasses.replace(experiment.data, tokenizer=pathlib.Path("tok.json"))
    with pytest.raises(ValueError, match=r"data.tokenizer = .*Path\('tok.json'\)"):
        experiment_text(dataclasses.replace(experiment, data=data))


def test_provenance_says_which_line_set_what(folder):
    text = read_experiment(["main.gin"], ["STEPS = 3"]).provenance()
    lines = {
        line.split("#")[0].strip(): line.split("# ")[1] for line in text.splitlines()
    }
    assert lines["OptimConfig.peak_lr = 1"] == "base.gin:3"
    assert lines["STEPS = 3"] == "--gin_bindings STEPS = 3"
    assert "STEPS = 7" not in lines


@pytest.mark.parametrize(
    "path",
    FILES,
    ids=lambda p: f"{p.parent.name}/{p.stem}",
)
def test_committed_files_parse_and_build(path):
    if path.parent.name == "base":
        names = [
            p
            for p in EXPERIMENTS.glob("*/*.gin")
            if f"base/{path.name}" in p.read_text()
        ]
        assert names, f"no experiment includes {path.name}"
        return
    if path.stem.endswith("_base"):
        return  # Included by the ablation's files, not complete by itself.
    experiment = load_experiment([path])
    assert experiment.data.vocab_size == experiment.model.vocab_size
    assert isinstance(experiment.data, DataConfig)
    experiment.model.decoder()


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.parent.name != "base" and not p.stem.endswith("_base")],
    ids=lambda p: f"{p.parent.name}/{p.stem}",
)
def test_the_commonest_overrides_reach_every_committed_file(path):
    assignments = [
        "TrainConfig.num_steps=10",
        "OptimConfig.peak_lr=0.5",
        "OptimConfig.warmup_steps=1",
        "DataConfig.batch_size=8",
        "DataConfig.seq_len=64",
    ]
    for assignment in assignments:
        load_experiment([path], assignments=[assignment])
    train = load_experiment([path], assignments=assignments).train
    assert (train.num_steps, train.optim.peak_lr) == (10, 0.5)

"""Plans from gin files: every policy has one, and they survive being written."""

import pathlib

import pytest

from jaxaccel.cache.policy import CachePolicy
from jaxaccel.config import experiment_text, load_experiment
from jaxaccel.config.registry import _HOME


FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "kv_cache"
FILES = sorted(
    p
    for p in FOLDER.glob("*.gin")
    if not p.stem.endswith("_base") and "BenchConfig:" not in p.read_text()
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_plan_survives_being_written(path, tmp_path):
    experiment = load_experiment([path])
    plan = experiment.sample.cache
    written = tmp_path / "config.gin"
    written.write_text(experiment_text(experiment))
    assert load_experiment([written]) == experiment
    config = experiment.model.decoder()
    assert len(plan.policies(config.num_layers)) == config.num_layers


def test_every_policy_has_a_file():
    named = {
        type(policy).__name__
        for path in FILES
        for plan in [load_experiment([path]).sample.cache]
        for policy in (plan.policy, *(policy for _, policy in plan.layers))
    }
    known = {name for name in _HOME if name.endswith("CacheConfig")}
    policies = {cls.__name__ for cls in CachePolicy.__subclasses__()}
    # Benchmarks have some for themselves.
    assert named == known == {name for name in policies if not name.startswith("_")}

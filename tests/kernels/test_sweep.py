"""The tuning commands: right tilings are timed, the best is kept where it is found."""

import importlib
import json

import jax
import numpy as np
import pytest

from pallas_kernels._common import sweep, trial
from pallas_kernels._common.interpret import interpreted


OPS = {
    "engram_gate": "ci_f16",
    "engram_gather": "ci_f16",
    "host_gather": "ci_8_bits",  # of 40 lookups: steps that divide them
    "segment_sum": "ci_one_strip",
}


@pytest.mark.parametrize("op", OPS)
def test_the_best_tiling_is_written_where_it_is_looked_up(op, monkeypatch, tmp_path):
    tune, specs, config = (
        importlib.import_module(f"pallas_kernels.{op}.{part}")
        for part in ("tune", "specs", "config")
    )
    spec = next(s for s in specs.specs("ci") if s.name == OPS[op])
    tried = []

    def milliseconds(tiling, fn, args, want, *, whole):
        """The later it is tried the faster it is; nothing runs."""
        assert whole
        tried.append(tiling)
        return 1.0 / len(tried)

    monkeypatch.setattr(trial, "milliseconds", milliseconds)
    path = tmp_path / "table.json"
    argv = ["--json", str(path), "--specs", "ci", "--names", spec.name]
    sweep.main(op, specs.specs, tune.sweeps, argv)
    entries = json.loads(path.read_text())["entries"]
    assert set(entries) == {s.key for s in tune.sweeps(spec)}
    for entry in entries.values():
        assert entry.pop("ms") > 0
        assert config.Config(**entry) in tried
    for each in tune.sweeps(spec):
        assert set(each.tilings) <= set(tried)


@pytest.mark.parametrize("op", ["engram_gather", "segment_sum", "engram_gate"])
def test_what_is_timed_is_what_it_is_compared_with(op):
    tune, specs = (
        importlib.import_module(f"pallas_kernels.{op}.{part}")
        for part in ("tune", "specs")
    )
    spec = next(s for s in specs.specs("ci") if s.name == OPS[op])
    args = jax.jit(spec.arguments)(jax.random.key(0))
    if op == "engram_gather":
        # The command has no lookups left over; the public function does.
        args = (args[0], np.resize(np.asarray(args[1]), (128,)))
    for each in tune.sweeps(spec):
        want = jax.tree.leaves(jax.jit(each.exact)(*args))
        with interpreted():
            tiling = next(iter(each.tilings))
            got = jax.tree.leaves(jax.jit(each.make(tiling))(*args))
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)

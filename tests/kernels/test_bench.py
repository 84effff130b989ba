"""The benchmark: no speed for a wrong result, tables from files only."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels._common import bench, timing


LIMITS = bench.Ceilings(gbps=1000.0, tflops=10.0)


def case(implementation=lambda name: lambda x: x + 1.0, peers=None, flops=0):
    return bench.Case(
        workload="add 4x256",
        dtype="float32",
        arguments=lambda key: (jax.random.normal(key, (4, 256)),),
        implementation=implementation,
        reference=lambda x: x + 1.0,
        picked=lambda: "xla",
        bytes=8192,
        flops=flops,
        peers=peers or {},
    )


def rows(case, peers=(), implementations=("xla",)):
    return list(bench.measure_case(case, LIMITS, list(peers), list(implementations)))


def test_a_row_has_time_floor_and_peer():
    peer = lambda: (lambda x: x + 1.0, "1.2.3")  # noqa: E731
    (row,) = rows(case(peers={"other": peer}), ["other", "unheard of"])
    assert row["ms"] > 0
    assert row["floor_ms"] == pytest.approx(8192 / 1e9, rel=1e-3)
    assert row["share_of_ceiling"] == pytest.approx(
        row["floor_ms"] / row["ms"], rel=1e-2
    )
    assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ms"], rel=1e-2)
    assert (row["peer"], row["peer_version"]) == ("other", "1.2.3")
    assert row["timer"] == "host" or jax.default_backend() == "gpu"


def test_the_floor_is_the_larger_of_moving_and_computing():
    assert LIMITS.floor_ms(case(flops=10**9)) == pytest.approx(0.1)


def test_a_wrong_result_gets_no_speed():
    (row,) = rows(case(lambda name: lambda x: x + 1.1))
    assert row["ms"] is None
    assert row["gbps"] is None
    assert "wrong result" in row["note"]


def test_what_cannot_run_says_why():
    def refuse(name):
        raise NotImplementedError("needs a Hopper GPU")

    def absent():
        raise ImportError("no module named other")

    (row,) = rows(case(refuse))
    assert row["note"] == "did not run: needs a Hopper GPU"
    (row,) = rows(case(peers={"other": absent}), ["other"])
    assert row["ms"] > 0
    assert row["peer_ms"] is None
    assert "no module named other" in row["note"]


def test_the_command_writes_rows_and_fails_on_a_wrong_one(tmp_path, monkeypatch):
    from pallas_kernels.rms_norm import specs

    file = tmp_path / "deep" / "rows.json"
    arguments = ["rms_norm", "--json", str(file), "--implementations", "xla"]
    monkeypatch.setattr(bench, "ceilings", lambda: LIMITS)
    good, bad = case(), case(lambda name: lambda x: x * 0.0)
    monkeypatch.setattr(specs, "bench_cases", lambda tag: iter([good]))
    assert bench.main(arguments) == 0
    monkeypatch.setattr(specs, "bench_cases", lambda tag: iter([good, bad]))
    assert bench.main(arguments) == 1
    written = json.loads(file.read_text())
    assert written["ceilings"]["gbps"] == 1000.0
    first = written["rows"][0]
    assert {"op", "device", "jax", "date", "commit"} <= first.keys()
    readme = f"# op\n{bench.BEGIN}\nold\n{bench.END}\ntail\n"
    text = bench.rendered(readme, written)
    assert "old" not in text
    assert "add 4x256" in text
    assert "wrong result" in text
    assert text.endswith(f"{bench.END}\ntail\n")
    assert bench.rendered(text, written) == text


def test_the_command_runs_the_ops_own_cases():
    from pallas_kernels.rms_norm import specs

    first = next(iter(specs.bench_cases("ci")))
    names = list(first.peers)
    (row, *_) = rows(first, ["tokamax"])
    assert names == ["xla", "tokamax"]
    assert row["ms"] > 0


def test_measuring_needs_an_op_and_a_file():
    with pytest.raises(SystemExit):
        bench.main(["rms_norm"])
    with pytest.raises(ValueError, match="BEGIN"):
        bench.rendered("no markers", {})


def test_a_tables_file_and_its_readme_agree():
    for file in (bench.ROOT / "experiments" / "results").glob("*_h200.json"):
        readme = bench.ROOT / "pallas_kernels" / file.name.removesuffix("_h200.json")
        if (readme / "README.md").is_file():
            text = (readme / "README.md").read_text()
            assert bench.rendered(text, json.loads(file.read_text())) == text


def test_kernel_times_are_split_evenly_or_not_at_all():
    assert timing._per_run([1.0, 2.0, 3.0, 4.0], 2) == [[1.0, 2.0], [3.0, 4.0]]
    for kernels in ([], [1.0, 2.0, 3.0]):
        with pytest.raises(timing.TimerUnavailable):
            timing._per_run(kernels, 2)


def test_ceilings_are_measured_here_too():
    limits = bench.ceilings()
    assert limits.gbps > 0
    assert limits.tflops > 0
    assert jnp.isfinite(limits.floor_ms(case()))

"""The benchmark: no speed for a wrong result, tables from files only."""

import contextlib
import dataclasses
import importlib
import json
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels._common import (
    bench,
    bench_command,
    dispatch,
    jobs,
    report,
    timing,
)


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
    names = implementations and list(implementations)
    return list(bench.measure_case(case, LIMITS, list(peers), names))


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


def test_an_op_is_measured_in_the_implementations_it_has():
    def only_xla(name):
        dispatch.select("an_op", name, {}, available=("xla",))
        return lambda x: x + 1.0

    (row,) = rows(case(only_xla), implementations=None)
    assert row["implementation"] == "xla"
    missing, found = rows(case(only_xla), implementations=["mosaic", "xla"])
    assert "'mosaic' is unknown" in missing["note"]
    assert found["ms"] > 0


def test_one_that_breaks_leaves_a_note_and_the_others_their_times():
    def out_of_memory(name):
        if name == "mosaic":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\n" + "0x00 " * 999)
        return lambda x: x + 1.0

    broken, fine = rows(case(out_of_memory), implementations=["mosaic", "xla"])
    assert broken["note"] == "did not run: RESOURCE_EXHAUSTED: out of memory"
    assert fine["ms"] > 0

    def too_large(*args):
        raise RuntimeError("x" * 1000)

    for change, text in (
        ({"arguments": too_large}, "no arguments: xxx"),
        ({"reference": too_large}, "no reference: xxx"),
    ):
        (row,) = rows(dataclasses.replace(case(), **change))
        assert text in row["note"]
        assert len(row["note"]) < 300
        assert row["ms"] is None


class OwnTimer:
    """A peer that JAX does not see: it gives the first result and its own times."""

    note = "its gradients were not checked"

    def __init__(self, error=0.0):
        self.error = error

    def results(self, args):
        return (jnp.asarray(np.asarray(args[0]) + 1.0 + self.error),)

    def measure(self, args):
        return [timing.Timing(ms=5.0, timer="its own", cache="warm")]


def test_a_peer_may_time_itself_but_its_result_is_checked():
    two = {
        "implementation": lambda name: lambda x: (x + 1.0, x),
        "reference": lambda x: (x + 1.0, x),
    }
    for error in (0.0, 0.1):
        peers = {"other": lambda error=error: (OwnTimer(error), "3")}
        (row,) = rows(dataclasses.replace(case(peers=peers), **two), ["other"])
        assert row["peer_version"] == "3"
        assert row["peer_ms"] == (None if error else 5.0)
        text = "other wrong result" if error else f"other {OwnTimer.note}"
        assert text in row["note"]


def test_an_implementation_is_not_timed_twice_to_be_its_own_peer():
    made = []

    def counted(name):
        made.append(name)
        return lambda x: x + 1.0

    found = case(counted, {"xla": lambda: (counted("peer"), "")})
    first, second = rows(found, ["xla"], ["mosaic", "xla"])
    assert made == ["mosaic", "xla"]
    assert (first["peer_ms"], second["peer"]) == (second["ms"], None)


def test_measurements_wait_for_what_tunes_on_the_card_alone(monkeypatch):
    taken = []

    @contextlib.contextmanager
    def together():
        taken.append(True)
        yield

    monkeypatch.setattr(timing, "together", together)
    x = jnp.ones((4, 4))
    bench._compile(lambda x: x + 1.0, (x,))
    assert not taken
    bench._compile(lambda x: jnp.dot(x, x, precision="highest"), (x,))
    assert taken == [True]


def test_large_results_are_compared_by_the_same_measures(monkeypatch):
    want = jax.random.normal(jax.random.key(1), (64, 256))
    spoiled = want.at[2].set(0.0)  # an eighth of the norm, all of a row
    messages = []
    for limit in (bench._ON_DEVICE, 0):
        monkeypatch.setattr(bench, "_ON_DEVICE", limit)
        bench._compare(want * (1 + 1e-6), want, 1e-4, "x")
        for got in (want * 1.009, spoiled, want.at[1, 1].set(jnp.nan)):
            with pytest.raises(AssertionError) as caught:
                bench._compare(got, want, 0.2 if got is spoiled else 0.008, "x")
            messages.append(str(caught.value))
    direct, on_device = messages[:3], messages[3:]
    assert direct[:2] == on_device[:2]
    assert all("not finite" in text for text in (direct[2], on_device[2]))


def test_the_command_writes_rows_and_fails_on_a_wrong_one(tmp_path, monkeypatch):
    from pallas_kernels.rms_norm import specs

    file = tmp_path / "deep" / "rows.json"
    arguments = ["rms_norm", "--json", str(file), "--implementations", "xla"]
    monkeypatch.setattr(bench, "ceilings", lambda: LIMITS)
    good, bad = case(), case(lambda name: lambda x: x * 0.0)
    monkeypatch.setattr(specs, "bench_cases", lambda tag: iter([good]))
    assert bench_command.main(arguments) == 0
    assert len(json.loads(file.read_text())["rows"]) == 1
    monkeypatch.setattr(specs, "bench_cases", lambda tag: iter([good, bad]))
    assert bench_command.main(arguments) == 1
    written = json.loads(file.read_text())
    assert written["ceilings"]["gbps"] == 1000.0
    first = written["rows"][0]
    assert {"op", "device", "jax", "date", "commit"} <= first.keys()
    readme = f"# op\n{report.BEGIN}\nold\n{report.END}\ntail\n"
    text = report.rendered(readme, written)
    assert "old" not in text
    assert "add 4x256" in text
    assert "wrong result" in text
    assert text.endswith(f"{report.END}\ntail\n")
    assert report.rendered(text, written) == text


def test_workloads_can_be_measured_in_several_calls(tmp_path, monkeypatch):
    from pallas_kernels.rms_norm import specs

    file = tmp_path / "rows.json"
    monkeypatch.setattr(bench, "ceilings", lambda: LIMITS)
    first, second = (dataclasses.replace(case(), workload=f"add {i}") for i in (1, 2))
    arguments = ["rms_norm", f"--json={file}", "--implementations=xla"]
    for cases, more in (
        ([first, second], ["--commit=aaaaaaaaa"]),
        ([second], ["--commit=bbbbbbbbb", "--append"]),
    ):
        monkeypatch.setattr(specs, "bench_cases", lambda tag, cases=cases: iter(cases))
        assert bench_command.main([*arguments, *more]) == 0
    written = json.loads(file.read_text())
    commits = {row["workload"]: row["commit"] for row in written["rows"]}
    assert commits == {"add 1": "aaaaaaaaa", "add 2": "bbbbbbbbb"}
    # The table's heading is of the last call; a row of another one says so.
    heading, *_, older, newer = report.table(written).splitlines()
    assert "commit bbbbbbb." in heading
    assert "add 1" in older
    assert "commit aaaaaaa," in older
    assert "commit" not in newer
    assert bench_command.main(arguments) == 0
    assert [r["workload"] for r in json.loads(file.read_text())["rows"]] == ["add 2"]


def test_jobs_share_the_workloads_and_their_rows_come_in_order(tmp_path, monkeypatch):
    from pallas_kernels.rms_norm import specs

    cases = [dataclasses.replace(case(), workload=f"add {i}") for i in range(5)]
    monkeypatch.setattr(specs, "bench_cases", lambda tag: iter(cases))
    monkeypatch.setattr(bench, "ceilings", lambda: LIMITS)
    environments = []

    class Job:
        """Runs the command here instead of in a process."""

        def __init__(self, command, *, env, cwd):
            assert command[1:3] == ["-m", "pallas_kernels.bench"]
            environments.append(env)
            self.returncode = bench_command.main(command[3:])

        def poll(self):
            return self.returncode

    monkeypatch.setattr(jobs.subprocess, "Popen", Job)
    file = tmp_path / "rows.json"
    arguments = ["rms_norm", "--json", str(file), "--implementations", "xla"]
    assert bench_command.main([*arguments, "--jobs", "2", "--commit", "abc"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["workload"] for row in rows] == [case.workload for case in cases]
    assert (
        bench_command.main(
            [*arguments, "--jobs", "2", "--only", "d 3,d 1", "--commit", "abc"]
        )
        == 0
    )
    chosen = json.loads(file.read_text())["rows"]
    assert [row["workload"] for row in chosen] == ["add 1", "add 3"]
    assert {row["commit"] for row in rows} == {"abc"}
    locks = [env[timing.DEVICE_LOCK] for env in environments]
    assert locks[0] == locks[1] != locks[2] == locks[3]


def test_a_job_that_dies_is_no_success(monkeypatch):
    stopped = []

    class Job:
        returncode = None

        def __init__(self, command, *, env, cwd):
            del env, cwd
            file, share = command[-1], command[-3]
            if share == "0/2":
                rows = [{"workload": "a"}]
                pathlib.Path(file).write_text(
                    json.dumps({"ceilings": {}, "rows": rows})
                )
                self.returncode = 0
            else:
                self.returncode = 1  # as of an uncaught error

        def poll(self):
            return self.returncode

        def terminate(self):
            stopped.append(self)

    monkeypatch.setattr(jobs.subprocess, "Popen", Job)
    seen = []
    with pytest.raises(RuntimeError, match=r"with \[0, 1\] and left out \['b'\]"):
        jobs.run_in_jobs("rms_norm", ["a", "b"], ["rms_norm"], 2, seen.append)
    assert seen[-1]["rows"] == [{"workload": "a"}]  # what there is was saved

    def fail(results):
        raise OSError("disk full")

    Job.poll = lambda self: None
    with pytest.raises(OSError, match="disk full"):
        jobs.run_in_jobs("rms_norm", ["a", "b"], ["rms_norm"], 2, fail)
    assert len(stopped) == 2


def test_a_failing_peer_costs_its_own_rows_alone():
    def broken():
        raise KeyError("mosaic")

    peers = {"broken": broken}
    (row, *_) = rows(dataclasses.replace(case(), peers=peers), ["broken"])
    assert row["ms"] > 0
    assert row["peer_ms"] is None
    assert "broken did not run: 'mosaic'" in row["note"]


def test_the_command_runs_the_ops_own_cases():
    from pallas_kernels.rms_norm import specs

    first = next(iter(specs.bench_cases("ci")))
    names = list(first.peers)
    (row, *_) = rows(first, ["tokamax"])
    assert names == ["xla", "tokamax"]
    assert row["ms"] > 0


def test_measuring_needs_an_op_and_a_file():
    with pytest.raises(SystemExit):
        bench_command.main(["rms_norm"])
    with pytest.raises(ValueError, match="BEGIN"):
        report.rendered("no markers", {})


def test_a_tables_file_and_its_readme_agree():
    for file in (bench.ROOT / "experiments" / "results").glob("*_h200.json"):
        readme = bench.ROOT / "pallas_kernels" / file.name.removesuffix("_h200.json")
        if (readme / "README.md").is_file():
            text = (readme / "README.md").read_text()
            assert report.rendered(text, json.loads(file.read_text())) == text


def test_kernel_times_are_split_evenly_or_not_at_all():
    seen = [("a", 1.0), ("b", 2.0), ("a", 4.0)]
    later = [(name, ms + 2.0) for name, ms in seen]
    runs = timing._per_run([*seen, *later], 2)
    assert runs == [seen, later]
    found = timing._timing(runs, "warm")
    assert found.ms == pytest.approx(10.0)  # between 7 and 13
    assert found.kernels == {"a": 7.0, "b": 3.0}
    assert timing._timing([seen, [*later[1:], later[0]]], "warm").kernels == {}
    for kernels in ([], [*seen, *later, *seen]):
        with pytest.raises(timing.TimerUnavailable):
            timing._per_run(kernels, 2)


def test_ceilings_are_measured_here_too():
    limits = bench.ceilings()
    assert limits.gbps > 0
    assert limits.tflops > 0
    assert jnp.isfinite(limits.floor_ms(case()))


@pytest.mark.parametrize("whole", [False, True])
def test_on_the_device_the_same_error_fails(whole):
    want = jax.random.normal(jax.random.key(0), (64, 32))
    near, far = want * 1.004, want * 1.009
    options = {"rel": 5e-3, "name": "y", "whole": whole}
    bench.assert_close_on_device(near, want, **options)
    with pytest.raises(AssertionError, match="y"):
        bench.assert_close_on_device(far, want, **options)
    with pytest.raises(AssertionError, match="y"):
        bench.assert_close_on_device(want.at[3, 4].set(jnp.nan), want, **options)


def test_who_measures_is_not_overtaken_by_those_who_share(monkeypatch, tmp_path):
    """A second one asks to share after one has asked to be alone: it comes later."""
    monkeypatch.setenv(timing.DEVICE_LOCK, str(tmp_path / "lock"))
    order: list[str] = []

    def enter(kind, name):
        with kind():
            order.append(name)

    def waiting(kind, name):
        thread = threading.Thread(target=enter, args=(kind, name))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        return thread

    with timing.together():
        beside = threading.Thread(target=enter, args=(timing.together, "beside"))
        beside.start()
        beside.join()  # sharing is at once
        threads = [waiting(timing.alone, "alone"), waiting(timing.together, "later")]
    for thread in threads:
        thread.join()
    assert order == ["beside", "alone", "later"]


@pytest.mark.parametrize("op", pallas_kernels._OPS)
def test_a_reference_takes_what_an_op_is_measured_on(op):
    """In shapes alone: every kind of argument that its cases have."""
    specs = importlib.import_module(f"pallas_kernels.{op}.specs")
    workload = next(iter(specs.bench_cases("ci")))
    args = jax.eval_shape(workload.arguments, jax.random.key(0))
    results = jax.eval_shape(workload.reference, *jax.eval_shape(bench._exact, args))
    assert jax.tree.leaves(results)
    assert workload.picked()

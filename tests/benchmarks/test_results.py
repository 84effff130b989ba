"""Files of rows that are measured in several runs."""

import json

import pytest

from jaxaccel.benchmarks import results


def row(workload, implementation, ms, **more):
    return {
        "op": "x",
        "workload": workload,
        "implementation": implementation,
        "ms": ms,
        **more,
    }


def test_rows_of_another_run_stay_and_equal_ones_are_replaced(tmp_path):
    path = tmp_path / "new" / "rows.json"
    results.update(path, [row("a", "xla", 1.0), row("a", "mosaic", 2.0)])
    results.update(path, [row("b", "xla", 3.0), row("a", "mosaic", 4.0)])
    assert [r["ms"] for r in results.read(path)] == [1.0, 3.0, 4.0]
    results.update(path, [row("a", "xla", 5.0, batch=8)], place=("op", "batch"))
    assert [r["ms"] for r in results.read(path)] == [1.0, 3.0, 4.0, 5.0]
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]


def test_a_file_that_is_no_rows_is_not_overwritten(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"rows": [')
    with pytest.raises(json.JSONDecodeError):
        results.update(path, [row("a", "xla", 1.0)])
    assert path.read_text() == '{"rows": ['
    assert results.read(tmp_path / "none.json") == []

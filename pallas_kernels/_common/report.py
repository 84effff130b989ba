"""Tables of measurements in the ops' README files, made from the result files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


ROOT = pathlib.Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- BEGIN measured -->", "<!-- END measured -->"


def joined(
    before: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    place: Sequence[str],
) -> list[Mapping[str, Any]]:
    """Rows that new ones do not replace, then the new ones.

    Args:
      before: rows of a file.
      rows: new ones.
      place: keys; a row replaces those that have all their values in common with it. A
        key that a row lacks is `None`.
    """

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in place)

    again = {key(row) for row in rows}
    return [*(row for row in before if key(row) not in again), *rows]


def table(results: Mapping[str, Any]) -> str:
    """The Markdown table of a result file."""
    limits = results["ceilings"]
    lines = [
        f"{limits['device']}, jax {limits['jax']}, {limits['date']}, commit "
        f"{(limits['commit'] or 'unknown')[:7]}. Ceilings in the same call: copy "
        f"{limits['gbps']:.0f} GB/s, bf16 matmul {limits['tflops']:.0f} TFLOP/s.",
        "",
        "| workload | runs | cache | ms | GB/s | share of ceiling | peer | peer ms "
        "| ratio | picked | note |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        notes = [row["note"]]
        if row["commit"] != limits["commit"]:
            notes.append(f"commit {(row['commit'] or 'unknown')[:7]}, {row['date']}")
        cells = (
            row["workload"],
            row["implementation"],
            row["cache"],
            row["ms"],
            row["gbps"],
            row["share_of_ceiling"],
            row["peer"],
            row["peer_ms"],
            row["ratio"],
            row["picked"],
            "; ".join(filter(None, notes)),
        )
        lines.append(
            "| " + " | ".join("" if c is None else str(c) for c in cells) + " |"
        )
    return "\n".join(lines)


def rendered(readme: str, results: Mapping[str, Any]) -> str:
    """A README with the table between its markers replaced.

    Raises:
      ValueError: the markers are missing.
    """
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"no {BEGIN!r} and {END!r} in the README")
    before, rest = readme.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def render(ops: list[str]) -> None:
    """Rewrites the README tables of the ops that have a result file."""
    for op in ops:
        source = ROOT / "experiments" / "results" / f"{op}_h200.json"
        if source.is_file():
            readme = ROOT / "pallas_kernels" / op / "README.md"
            readme.write_text(
                rendered(readme.read_text(), json.loads(source.read_text()))
            )
            print(f"{readme.relative_to(ROOT)} from {source.relative_to(ROOT)}")

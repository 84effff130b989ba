"""Result files of the system benchmarks."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels._common.report import joined


PLACE = ("op", "workload", "implementation")
"""What tells the rows of most benchmarks apart."""


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file, none if there is no file yet."""
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def write(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
    unfinished.replace(path)


def update(
    path: pathlib.Path,
    rows: Sequence[Mapping[str, Any]],
    place: Sequence[str] = PLACE,
) -> None:
    """Writes rows behind those of the file that they do not replace.

    So a benchmark can be run in parts, each row with the commit and the date of its
    own run.

    Args:
      path: of the file, which need not exist.
      rows: new ones.
      place: what tells rows apart, see `report.joined`.
    """
    write(path, joined(read(path), rows, place))

"""Result files of the system benchmarks."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def write(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
    unfinished.replace(path)

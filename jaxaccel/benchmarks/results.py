"""Result files: rows with where, when and of what commit they were measured."""

from __future__ import annotations

import datetime
import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import jax


ROOT = pathlib.Path(__file__).resolve().parents[2]


def stamp(commit: str | None = None) -> dict[str, Any]:
    """Device, jax version, date and commit of a measurement made now.

    Args:
      commit: of the code, where git cannot say.
    """
    if commit is None:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = answer.stdout.strip() or None
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
    }


def write(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
    unfinished.replace(path)


def digits(value: float, count: int = 4) -> float:
    """Rounds to significant digits."""
    return float(f"{value:.{count}g}")

"""What a work folder holds, in the form that the page shows."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxaccel.training.metrics import METRICS_FILE, read_metrics


CONFIG_FILE = "config.gin"

# A curve's title and unit.
Title = tuple[str, str]

_HELDOUT: Title = ("Held-out loss", "nats/byte")
# Title -> kind of the metric row, name of the value, factor.
_CURVES: Mapping[Title, tuple[str, str, float]] = {
    ("Training loss", "nats/token"): ("train", "nats_per_token", 1.0),
    _HELDOUT: ("eval", "nats_per_byte", 1.0),
    ("Throughput", "tokens/s"): ("train", "tokens_per_second", 1.0),
    ("Compute", "TFLOP/s"): ("train", "tflops", 1.0),
    ("Peak memory", "GB"): ("train", "peak_memory_bytes", 1e-9),
    ("Waiting for data", "% of the time"): ("train", "data_wait", 100.0),
    ("Gradient norm", ""): ("train", "grad_norm", 1.0),
    ("Learning rate", ""): ("train", "lr", 1.0),
    ("Router: largest load over the mean, minus 1", ""): (
        "train",
        "router_max_violation",
        1.0,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
      name: name of its folder.
      path: the folder.
      series: curves by title, each (step, value) by step; NaN where none was finite.
      levels: labels and values of horizontal lines in a curve's chart.
      summary: figures as text.
      samples: texts that the run wrote.
      settings: the configuration, "TrainConfig.num_steps" -> "120".
      config_text: the configuration as it is in the folder, "" if it has none.
    """

    name: str
    path: pathlib.Path
    series: Mapping[Title, Sequence[tuple[float, float]]]
    levels: Mapping[Title, Sequence[tuple[str, float]]]
    summary: Mapping[str, str]
    samples: Sequence[str]
    settings: Mapping[str, str]
    config_text: str


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Reads a work folder.

    Args:
      folder: the `--workdir` of a run, finished or not.

    Returns:
      The run.

    Raises:
      FileNotFoundError: the folder does not exist, or no run has reported in it.
      ValueError: the metrics cannot be read.
    """
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run folder {path}")
    try:
        rows = read_metrics(path)
    except ValueError as error:
        raise ValueError(f"{path / METRICS_FILE} is damaged: {error}") from error
    if not rows:
        raise FileNotFoundError(f"{path} holds no run: {METRICS_FILE} has no rows")
    config = path / CONFIG_FILE
    config_text = config.read_text(encoding="utf-8") if config.is_file() else ""
    series = {}
    for title, (kind, name, factor) in _CURVES.items():
        points = _points(rows, kind, name, factor)
        if any(math.isfinite(value) for _, value in points):
            series[title] = points
    baselines = [
        (name.replace("_", " "), value)
        for name in ("byte_bigram", "token_bigram")
        if (value := _last(rows, "baseline", f"{name}_nats_per_byte")) is not None
    ]
    return Run(
        name=path.resolve().name,
        path=path,
        series=series,
        levels={_HELDOUT: baselines},
        summary=_summary(rows),
        samples=[row["text"] for row in rows if row["kind"] == "sample"],
        settings=parse_settings(config_text),
        config_text=config_text,
    )


def parse_settings(config_text: str) -> dict[str, str]:
    """Takes apart the sections of a `config.gin` that a run wrote."""
    settings = {}
    section = ""
    for line in config_text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            section = line.removesuffix(":")
        else:
            name, _, value = line.strip().partition(" = ")
            settings[f"{section}.{name}"] = value
    return settings


def _points(
    rows: Sequence[Mapping[str, Any]], kind: str, name: str, factor: float
) -> list[tuple[float, float]]:
    points = []
    for row in rows:
        if row["kind"] == kind and name in row:
            value = row[name]
            points.append((row["step"], math.nan if value is None else value * factor))
    return points


def _last(rows: Sequence[Mapping[str, Any]], kind: str, name: str) -> float | None:
    values = [row.get(name) for row in rows if row["kind"] == kind]
    return next((value for value in reversed(values) if value is not None), None)


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Figures of the whole run, those that it has."""
    heldout = [v for _, v in _points(rows, "eval", "nats_per_byte", 1.0)]
    speed = [v for _, v in _points(rows, "train", "tokens_per_second", 1.0)]
    speed = [value for value in speed if math.isfinite(value)]
    memory = _last(rows, "train", "peak_memory_bytes")
    mfu = _last(rows, "train", "mfu")
    seconds = _last(rows, "end", "train_seconds")
    seen = _last(rows, "train", "tokens_seen")
    bigram = _last(rows, "baseline", "byte_bigram_nats_per_byte")
    loss = _last(rows, "train", "nats_per_token")
    ended = [row for row in rows if row["kind"] == "end"]
    state = "unfinished"
    if ended:
        state = "interrupted" if ended[-1].get("interrupted") else "complete"
    figures = {
        "state": state,
        "last step": f"{rows[-1]['step']}",
        "held-out loss, first (nats/byte)": f"{heldout[0]:.4f}" if heldout else None,
        "held-out loss, last (nats/byte)": f"{heldout[-1]:.4f}" if heldout else None,
        "byte bigram, held-out (nats/byte)": _format(bigram, ".4f"),
        "training loss, last (nats/token)": _format(loss, ".4f"),
        "tokens seen": _format(seen, ",.0f"),
        "tokens/s, median": f"{statistics.median(speed):,.0f}" if speed else None,
        "MFU, last": None if mfu is None else f"{100 * mfu:.1f} %",
        "peak memory (GB)": None if memory is None else f"{memory / 1e9:.2f}",
        "training time (s)": _format(seconds, ".1f"),
    }
    return {key: value for key, value in figures.items() if value is not None}


def _format(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)

"""Where the figures of a run go: JSON lines, TensorBoard, and one line of text.

`metrics.jsonl` has one object a line. All have "kind", "step" and "time" (seconds since
1970); a value that is not finite is null. Kinds:

- "baseline": "byte_bigram_nats_per_byte", "token_bigram_nats_per_byte" on held-out text
- "eval": "nats_per_byte", "nats_per_token", "accuracy" on held-out text, and
  "ema_nats_per_byte" where the run keeps a running mean of the parameters; tables of an
  n-gram memory have none, the mean of the others is evaluated with them as they are
- "train": means over the steps since the last row ("loss", "nats_per_token",
  "nats_per_byte", "accuracy", "grad_norm", "lr", "router_*"), "tokens_seen",
  "seconds_per_step", "tokens_per_second", "tflops", "mfu", "data_wait" (a fraction) and
  "peak_memory_bytes". Of routers, over all layers of a step: "router_balance_loss",
  "router_entropy" in nats, "router_max_violation" (the fullest expert's load over the
  mean, minus one), "router_min_load" (the emptiest one's over the mean),
  "router_dead_experts" (their number) and "router_overflow" (share of rows that found
  no room on their expert's device)
- "sample": "text"
- "end": "interrupted", "train_seconds" of all lives of the run, without what was lost
  between a checkpoint and a kill
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import numpy as np


METRICS_FILE = "metrics.jsonl"


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a run, oldest first; a last line that was cut off is left out."""
    path = pathlib.Path(workdir) / METRICS_FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


class Window:
    """Figures of the steps since the last row."""

    def __init__(self):
        self.rows: list[np.ndarray] = []
        self.restart(0)

    def restart(self, untimed: int) -> None:
        """Starts the clock; so many of the rows are from before."""
        self.untimed = untimed
        self.started = time.perf_counter()
        self.paused = 0.0
        self.starved = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started - self.paused


class MetricsWriter:
    """Appends rows to `metrics.jsonl`, and to TensorBoard files if asked."""

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        start_step: int | None = None,
        tensorboard: bool = False,
    ):
        """Opens the files.

        Args:
          workdir: folder of the run.
          start_step: the step of the checkpoint that the run goes on from; rows of
            later steps are of a life of the run that left no checkpoint, and are
            removed, as is an evaluation of this step, which the checkpoint tells.
            `None` starts over and removes all.
          tensorboard: also write TensorBoard event files under `tensorboard/`.

        Raises:
          ValueError: `tensorboard` without the package.
        """
        folder = pathlib.Path(workdir)
        last = -1 if start_step is None else start_step
        rows = [row for row in read_metrics(folder) if row["step"] <= last]
        rows = [
            row
            for row in rows
            if row["kind"] not in ("end", "sample")
            and (row["kind"], row["step"]) != ("eval", last)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        draft = folder / f"{METRICS_FILE}.tmp"
        draft.write_text(text, encoding="utf-8")
        draft.replace(folder / METRICS_FILE)
        self._file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115
        self._board = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise ValueError(
                    "tensorboard=True needs the package tensorboardx; install "
                    "jaxaccel[tensorboard]"
                ) from error
            self._board = SummaryWriter(
                str(folder / "tensorboard"), purge_step=last + 1
            )

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds a row; see the module for kinds and names."""
        row = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        row |= {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(row) + "\n")
        # A killed run must not lose what it has reported.
        self._file.flush()
        if self._board is None:
            return
        for name, value in values.items():
            if isinstance(value, str):
                self._board.add_text(f"{kind}/{name}", value, step)
            elif value is not None:
                self._board.add_scalar(f"{kind}/{name}", float(value), step)

    def close(self) -> None:
        """Ends both files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _amount(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.2f}{unit}"
    return f"{value:.0f}"


def progress_line(num_steps: int, step: int, row: Mapping[str, Any]) -> str:
    """A "train" row as one line of text."""
    mfu, memory = row["mfu"], row["peak_memory_bytes"]
    return "  ".join(
        (
            f"step {step}/{num_steps}",
            f"loss {row['loss']:.4f}",
            f"{row['nats_per_byte']:.4f} nats/byte",
            f"grad {row['grad_norm']:.3f}",
            f"lr {row['lr']:.2e}",
            f"{_amount(row['tokens_per_second'])} tok/s",
            f"{row['tflops']:.3g} TFLOP/s",
            f"MFU {'n/a' if mfu is None else f'{100 * mfu:.1f}%'}",
            f"data wait {100 * row['data_wait']:.1f}%",
            f"mem {'n/a' if memory is None else f'{_amount(memory)}B'}",
        )
    )


class Console:
    """Lines for people: `status` rewrites one line on a terminal, `say` keeps it.

    Where the stream is no terminal, a status that reports progress is a plain line
    and one that only says what is going on is left out.
    """

    def __init__(self, *, is_quiet: bool = False, stream: TextIO | None = None):
        """Uses standard error by default; `is_quiet` says nothing at all."""
        self._stream = sys.stderr if stream is None else stream
        self._is_quiet = is_quiet
        self._is_terminal = self._stream.isatty()

    def _write(self, text: str) -> None:
        if not self._is_quiet:
            self._stream.write(text)
            self._stream.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(f"\r\x1b[K{text}\n" if self._is_terminal else f"{text}\n")

    def status(self, text: str, *, is_progress: bool = True) -> None:
        """A line that the next one may replace."""
        if self._is_terminal:
            self._write(f"\r\x1b[K{text}")
        elif is_progress:
            self._write(f"{text}\n")

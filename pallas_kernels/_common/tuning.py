"""Measured kernel configs, one file per card and op; no file means the heuristic.

`tuned/<device>/<op>.json` is `{"device", "jax", "date", "entries": {key: config}}`.
A key buckets sizes to the next power of two, so one measurement serves its
neighbourhood.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from pallas_kernels._common import hw


_log = logging.getLogger("pallas_kernels")


def bucket(size: int) -> int:
    """The power of two at or above `size`."""
    if size < 1:
        raise ValueError(f"size={size} has no bucket, allowed are positive sizes")
    return 1 << (size - 1).bit_length()


def key(**parts: Any) -> str:
    """Writes a table key: `key(rows=16384, dtype="bfloat16")` -> one string."""
    return ",".join(f"{name}={value}" for name, value in parts.items())


def lookup(op: str, entry: str, device: str | None = None) -> Mapping[str, Any] | None:
    """The measured config fields for a key, `None` where nothing was measured.

    Args:
      op: the op's name.
      entry: what `key` made of the call's sizes.
      device: a card's folder; the present card's if not given.
    """
    return _table(hw.device().slug if device is None else device, op).get(entry)


def write(
    path: pathlib.Path, about: Mapping[str, Any], entries: Mapping[str, Any]
) -> None:
    """Writes a table where `lookup` finds it.

    Args:
      path: `tuned/<device>/<op>.json`; its folder is made.
      about: has "device", "jax" and "date" of the measurement.
      entries: key -> config fields.
    """
    table = {name: about[name] for name in ("device", "jax", "date")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table | {"entries": entries}, indent=1) + "\n")


@functools.cache
def _table(device: str, op: str) -> Mapping[str, Mapping[str, Any]]:
    folder = importlib.resources.files("pallas_kernels") / "tuned" / device
    if not folder.is_dir():
        _announce_unknown(device)
        return {}
    file = folder / f"{op}.json"
    return json.loads(file.read_text())["entries"] if file.is_file() else {}


@functools.cache
def _announce_unknown(device: str) -> None:
    _log.warning(
        "no tuned kernel configs for %s, heuristics made for an H200 are used", device
    )

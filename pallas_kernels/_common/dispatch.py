"""Choosing an implementation: named ones are obeyed or refused, never replaced.

Every op's `api.py` holds a function `choose(*args, implementation=None, **options)
-> Choice` that calls `select` with one reason per implementation that cannot run.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal


Implementation = Literal["reference", "xla", "mosaic"]

# Best first; `None` takes the first that has no reason against it.
PREFERENCE: tuple[Implementation, ...] = ("mosaic", "xla", "reference")

_log = logging.getLogger("pallas_kernels")

_records: contextvars.ContextVar[tuple[list[Choice], ...]] = contextvars.ContextVar(
    "choice_records", default=()
)


class UnknownImplementation(ValueError):
    """An op was asked for an implementation that it does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What a call runs.

    Attributes:
      op: the op's name.
      implementation: "reference", "xla" or "mosaic".
      config: the kernel's `Config`, `None` where the implementation has none.
      source: "named" (the caller asked), or "automatic".
      refused: implementation -> why it was passed over.
    """

    op: str
    implementation: Implementation
    config: Any = None
    source: str = "automatic"
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.op}: {self.implementation} ({self.source})"
        if self.config is not None:
            text += f", {self.config}"
        for name, reason in self.refused.items():
            text += f"\n  not {name}: {reason}"
        return text


def select(
    op: str,
    requested: str | None,
    refused: Mapping[str, str],
    *,
    available: tuple[Implementation, ...] = PREFERENCE,
    only_named: Mapping[str, str] | None = None,
    config: Any = None,
) -> Choice:
    """Picks an implementation.

    Args:
      op: the op's name, for messages.
      requested: the caller's `implementation`; `None` takes the best.
      refused: implementation -> reason, for each that cannot run these inputs.
      available: the implementations this op has, best first.
      only_named: implementation -> reason, for each that runs if it is asked for but
        is never picked: one that no measured row speaks for, say.
      config: the kernel config to report if "mosaic" is taken.

    Returns:
      The choice. An automatic one is logged once per op, implementation and reason.

    Raises:
      UnknownImplementation: `requested` is no implementation of this op.
      NotImplementedError: `requested` cannot run these inputs; the reason is given.
    """
    only_named = {} if only_named is None else only_named
    if requested is not None:
        if requested not in available:
            raise UnknownImplementation(
                f"{op}: implementation={requested!r} is unknown, allowed are "
                f"{', '.join(map(repr, available))} and None"
            )
        if requested in refused:
            raise NotImplementedError(
                f"{op}: implementation={requested!r} cannot run this call: "
                f"{refused[requested]}"
            )
        picked, source = requested, "named"
    else:
        refused = {**only_named, **refused}
        picked = next((name for name in available if name not in refused), None)
        if picked is None:
            reasons = "; ".join(f"{n}: {r}" for n, r in refused.items())
            raise NotImplementedError(f"{op}: nothing can run this call ({reasons})")
        source = "automatic"
    passed_over: dict[str, str] = {
        name: refused[name]
        for name in available[: available.index(picked)]
        if name in refused
    }
    if source == "automatic":
        _announce(op, picked, tuple(passed_over.items()))
    choice = Choice(
        op=op,
        implementation=picked,
        config=config if picked == "mosaic" else None,
        source=source,
        refused=passed_over,
    )
    for record in _records.get():
        record.append(choice)
    return choice


@contextlib.contextmanager
def recorded_choices() -> Iterator[list[Choice]]:
    """Collects the choices made inside, in their order.

    Choices are made while a function is traced: a call of a program that is compiled
    already makes none, so the record belongs around `.lower` or a first call.
    """
    record: list[Choice] = []
    token = _records.set((*_records.get(), record))
    try:
        yield record
    finally:
        _records.reset(token)


@functools.cache
def _announce(op: str, picked: str, passed_over: tuple[tuple[str, str], ...]) -> None:
    why = "".join(f"; not {name}: {reason}" for name, reason in passed_over)
    _log.info("%s runs %s%s", op, picked, why)


def explain(op: str, *args: Any, **options: Any) -> Choice:
    """Says which implementation a call would run, and why not a faster one.

    Args:
      op: an op's name, such as "rms_norm".
      *args: what the op would be called with; `jax.ShapeDtypeStruct` will do.
      **options: the op's keywords, `implementation` among them.

    Returns:
      A `Choice`; printing it gives one readable block.

    Raises:
      ValueError: there is no such op.
    """
    from pallas_kernels import _OPS

    if op not in _OPS:
        raise ValueError(f"no op {op!r}, allowed are {', '.join(_OPS)}")
    api = importlib.import_module(f"pallas_kernels.{op}.api")
    return api.choose(*args, **options)

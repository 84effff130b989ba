"""Writes an experiment as one gin file that needs no other and sets everything."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jaxaccel.config import registry


def experiment_text(experiment: registry.Experiment, *, header: str = "") -> str:
    """Spells an experiment so that loading the text gives an equal one.

    Args:
      experiment: the configs.
      header: lines to begin with, as comments.

    Returns:
      Gin statements, defaults included, without includes and macros.

    Raises:
      ValueError: a setting has a value that gin cannot spell; it is named.
    """
    writer = _Writer(experiment)
    comments = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    imports = "".join(f"import {module}\n" for module in sorted(writer.modules))
    return "\n".join(part for part in (comments, imports, *writer.blocks()) if part)


class _Writer:
    def __init__(self, root: Any):
        counts = collections.Counter(type(node).__name__ for node in _nodes(root))
        self._repeated = {name for name, count in counts.items() if count > 1}
        self._sections: list[tuple[str, list[str]]] = []
        self.modules = {
            type(node).__module__
            for node in _nodes(root)
            if type(node).__name__ not in registry.names()
        }
        self._visit(root, ())

    def blocks(self) -> Iterator[str]:
        for title, lines in self._sections:
            yield f"{title}:\n" + "".join(f"    {line}\n" for line in lines)

    def _visit(self, node: Any, path: tuple[str, ...]) -> str:
        """Adds the section of one config; returns the reference to it."""
        name = type(node).__name__
        # Configs of one class need scopes to hold different settings.
        scope = re.sub(r"\W", "_", "_".join(path))
        title = f"{scope}/{name}" if name in self._repeated else name
        lines: list[str] = []
        self._sections.append((title, lines))
        for field in dataclasses.fields(node):
            if field.init:
                value = getattr(node, field.name)
                text = self._literal(value, (*path, field.name))
                lines.append(f"{field.name} = {text}")
        if not lines:
            # Gin has no empty section, and none is needed.
            self._sections.remove((title, lines))
        return f"@{title}()"

    def _literal(self, value: Any, path: tuple[str, ...]) -> str:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._visit(value, path)
        if isinstance(value, tuple | list):
            items = [self._literal(v, (*path, str(i))) for i, v in enumerate(value)]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if isinstance(value, dict):
            items = [
                f"{self._literal(k, path)}: {self._literal(v, (*path, str(k)))}"
                for k, v in value.items()
            ]
            return f"{{{', '.join(items)}}}"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        raise ValueError(f"{'.'.join(path)} = {value!r} has no spelling in a gin file")


def _nodes(value: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in dataclasses.fields(value):
            yield from _nodes(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _nodes(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _nodes(item)

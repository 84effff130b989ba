"""From gin files to frozen configs, with file and line in every error.

Gin's grammar, registry and references are used; its global table of bindings is not.
Files are parsed into statements, the statements into one tree of config dataclasses,
and nothing stays behind: two experiments can be loaded in one process, from threads,
or in a notebook cell that runs again.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import gin

from jaxaccel.config import registry
from jaxaccel.config.checks import Mismatch, coerce
from jaxaccel.config.statements import (
    MACRO,
    Binding,
    ConfigError,
    Macro,
    Reader,
    Reference,
    annotations_of,
    find_configurable,
    macros_in,
    suggest,
)


@dataclasses.dataclass(frozen=True)
class LoadedExperiment:
    """An experiment and where its settings come from.

    Attributes:
      experiment: the frozen configs.
      bindings: the settings in effect; all others have their defaults.
      imports: modules that the files import.
    """

    experiment: registry.Experiment
    bindings: tuple[Binding, ...]
    imports: tuple[str, ...]

    def provenance(self) -> str:
        """One line a setting: its value and the file and line that set it."""
        lines = [f"{b.label} = {b.value!r}" for b in self.bindings]
        width = min(max(map(len, lines), default=0), 60)
        return "".join(
            f"{line:<{width}}  # {b.where}\n"
            for line, b in zip(lines, self.bindings, strict=True)
        )


def load_experiment(
    gin_files: Sequence[str | pathlib.Path],
    bindings: Sequence[str] = (),
    *,
    assignments: Sequence[str] = (),
    search_paths: Sequence[str | pathlib.Path] = (),
) -> registry.Experiment:
    """Builds the experiment that gin files and bindings describe.

    Args:
      gin_files: paths; a later file overrides an earlier one.
      bindings: gin statements such as "TrainConfig.steps = 10"; override the files.
      assignments: "NAME=VALUE" as in `--gin.NAME=VALUE`: like a binding, but a value
        that is no gin literal is taken as a string where a string is wanted.
      search_paths: folders in which files are looked for after the current folder;
        an include is looked for in the including file's folder first.

    Returns:
      The experiment.

    Raises:
      ConfigError: syntax, unknown name, wrong type, missing or unused or duplicate
        setting; the message begins with the file and line.
      FileNotFoundError: a gin file does not exist.
    """
    return read_experiment(
        gin_files, bindings, assignments=assignments, search_paths=search_paths
    ).experiment


def read_experiment(
    gin_files: Sequence[str | pathlib.Path],
    bindings: Sequence[str] = (),
    *,
    assignments: Sequence[str] = (),
    search_paths: Sequence[str | pathlib.Path] = (),
) -> LoadedExperiment:
    """Like `load_experiment`, and says where each setting comes from."""
    experiment, reader = _read(
        "Experiment", gin_files, bindings, assignments, search_paths
    )
    return LoadedExperiment(
        experiment, tuple(reader.bindings.values()), tuple(reader.imports)
    )


def load_config(
    name: str,
    gin_files: Sequence[str | pathlib.Path],
    bindings: Sequence[str] = (),
    *,
    assignments: Sequence[str] = (),
    search_paths: Sequence[str | pathlib.Path] = (),
) -> Any:
    """Builds another root than `Experiment`, such as a benchmark's config.

    Args:
      name: a configurable of the registry; what the files bind must be part of it.
      gin_files: as for `load_experiment`.
      bindings: likewise.
      assignments: likewise.
      search_paths: likewise.

    Returns:
      The config.

    Raises:
      ConfigError: as `load_experiment` raises.
      FileNotFoundError: a gin file does not exist.
    """
    return _read(name, gin_files, bindings, assignments, search_paths)[0]


def _read(
    root: str,
    gin_files: Sequence[str | pathlib.Path],
    bindings: Sequence[str],
    assignments: Sequence[str],
    search_paths: Sequence[str | pathlib.Path],
) -> tuple[Any, Reader]:
    registry.register_all()
    reader = Reader([pathlib.Path(path) for path in search_paths])
    for path in gin_files:
        reader.read_file(pathlib.Path(path))
    reader.read_command_line("--gin_bindings", bindings)
    reader.read_command_line("--gin", assignments, text_allowed=True)
    builder = _Builder(reader.bindings)
    config = builder.build_root(root)
    used = builder.used | _macros_of_replaced(reader)
    unused = [b for b in reader.bindings.values() if b.key not in used]
    if unused:
        raise ConfigError(
            "\n".join(
                f"{b.where}: {b.label} is set but nothing uses it"
                + ("" if b.selector == MACRO else _why_unused(b, builder.built))
                for b in unused
            )
        )
    return config, reader


def _macros_of_replaced(reader: Reader) -> set[tuple[str, str, str]]:
    """Keys of the macros that settings referred to before others replaced them.

    A file may well define a macro for a setting that the command line then sets: it
    is a macro without any use that tells of a mistake.
    """
    found: set[tuple[str, str, str]] = set()
    waiting = [name for b in reader.replaced for name in macros_in(b.value)]
    while waiting:
        key = (waiting.pop(), MACRO, "value")
        binding = reader.bindings.get(key)
        if binding is not None and key not in found:
            found.add(key)
            waiting.extend(macros_in(binding.value))
    return found


def _why_unused(binding: Binding, built: set[str]) -> str:
    if binding.selector in built:
        return " (a more specific scope overrides it, or its scope does not occur)"
    name = binding.selector.rsplit(".", 1)[-1]
    return f" (the experiment holds no @{name}())"


class _Builder:
    """Builds a tree of configs from the bindings."""

    def __init__(self, bindings: dict[tuple[str, str, str], Binding]):
        self.used: set[tuple[str, str, str]] = set()
        self.built: set[str] = set()
        self._bindings = bindings
        self._open_macros: list[str] = []

    def build_root(self, name: str) -> Any:
        root = Reference((), f"jaxaccel.{name}", evaluate=True)
        return self._build(root, (), f"the {name[0].lower()}{name[1:]}")

    def _build(self, reference: Reference, scopes: tuple[str, ...], where: str) -> Any:
        """Calls what a reference names with the settings of its scope."""
        configurable = find_configurable(reference.name, where)
        selector, target = configurable.selector, configurable.wrapped
        self.built.add(selector)
        # A reference without a scope stays in the scope it stands in.
        scopes = reference.scopes or scopes
        settings: dict[str, Binding] = {}
        for depth in range(len(scopes) + 1):
            prefix = "/".join(scopes[:depth])
            for binding in self._bindings.values():
                if (binding.scope, binding.selector) == (prefix, selector):
                    settings[binding.name] = binding
        annotations = annotations_of(target)
        arguments = {}
        for name, binding in settings.items():
            self.used.add(binding.key)
            value = self._evaluate(binding.value, scopes, binding.where)
            try:
                arguments[name] = coerce(value, annotations.get(name, Any))
            except Mismatch as mismatch:
                raise ConfigError(
                    f"{binding.where}: {binding.label}: {mismatch}"
                ) from None
        short = selector.rsplit(".", 1)[-1]
        missing = [
            name
            for name, parameter in inspect.signature(target).parameters.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind
            in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and name not in arguments
        ]
        if missing:
            names = ", ".join(f"{short}.{name}" for name in missing)
            raise ConfigError(f"{where}: {names} must be set")
        try:
            return target(**arguments)
        except (ValueError, TypeError) as error:
            # A check may span settings: give the places of those it speaks of.
            words = set(re.findall(r"\w+", str(error)))
            named = [b for b in settings.values() if b.name in words]
            places = ", ".join(
                dict.fromkeys(b.where for b in named or settings.values())
            )
            raise ConfigError(f"{places or where}: {short}: {error}") from error

    def _evaluate(self, value: Any, scopes: tuple[str, ...], where: str) -> Any:
        """Replaces macros and references by what they stand for."""
        if isinstance(value, list | tuple):
            return type(value)(self._evaluate(item, scopes, where) for item in value)
        if isinstance(value, dict):
            return {
                self._evaluate(k, scopes, where): self._evaluate(v, scopes, where)
                for k, v in value.items()
            }
        if isinstance(value, Macro):
            return self._macro(value.name, scopes, where)
        if not isinstance(value, Reference):
            return value
        if not value.evaluate:
            return find_configurable(value.name, where).wrapped
        return self._build(value, scopes, where)

    def _macro(self, name: str, scopes: tuple[str, ...], where: str) -> Any:
        binding = self._bindings.get((name, MACRO, "value"))
        if binding is None:
            known = [b.scope for b in self._bindings.values() if b.selector == MACRO]
            return _constant(name, where, suggest(name, known))
        if name in self._open_macros:
            raise ConfigError(f"{binding.where}: macro %{name} refers to itself")
        self.used.add(binding.key)
        self._open_macros.append(name)
        try:
            return self._evaluate(binding.value, scopes, binding.where)
        finally:
            self._open_macros.pop()


def _constant(name: str, where: str, hint: str) -> Any:
    """The value of a `gin.constant`, which are spelt like macros."""
    reference = gin.config.ParserDelegate().macro(name)
    if reference.config_key[1] != "gin.constant":
        raise ConfigError(f"{where}: macro %{name} is not defined{hint}")
    value = reference.scoped_configurable_fn()
    if value is gin.REQUIRED:
        raise ConfigError(f"{where}: this setting is required and not set")
    return value

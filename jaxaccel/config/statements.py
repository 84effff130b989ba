"""Reads gin files and command line bindings into statements with their places."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import pathlib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import gin
from gin import config_parser

from jaxaccel.config import registry
from jaxaccel.config.checks import accepts_text


MACRO = "gin.macro"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message begins with file and line."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/name` or `@scope/name()`."""

    scopes: tuple[str, ...]
    name: str
    evaluate: bool

    def __repr__(self) -> str:
        name = "/".join((*self.scopes, self.name))
        return f"@{name}()" if self.evaluate else f"@{name}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Binding:
    """One setting and where it was made.

    Attributes:
      scope: the names before the last slash, "" if none.
      selector: complete name of the configurable, "gin.macro" for a macro.
      name: the setting, "value" for a macro.
      value: what stands right of the equals sign, references not evaluated.
      where: "file:line" or the command line option.
    """

    scope: str
    selector: str
    name: str
    value: Any
    where: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scope, self.selector, self.name

    @property
    def label(self) -> str:
        if self.selector == MACRO:
            return self.scope
        name = f"{self.selector.rsplit('.', 1)[-1]}.{self.name}"
        return f"{self.scope}/{name}" if self.scope else name


def macros_in(value: Any) -> set[str]:
    """Names of the macros that a value refers to."""
    if isinstance(value, Macro):
        return {value.name}
    if isinstance(value, dict):
        value = (*value.keys(), *value.values())
    if isinstance(value, list | tuple):
        return set().union(*map(macros_in, value))
    return set()


def suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Reader:
    """Collects the statements of files, includes and the command line.

    Attributes:
      bindings: the settings in effect, by key.
      replaced: the settings that later ones took the place of.
      imports: modules that the files import.
    """

    def __init__(self, search_paths: list[pathlib.Path]):
        self.bindings: dict[tuple[str, str, str], Binding] = {}
        self.replaced: list[Binding] = []
        self.imports: list[str] = []
        self._search_paths = search_paths

    def read_file(self, path: pathlib.Path) -> None:
        """Reads a file and what it includes; raises FileNotFoundError."""
        self._read(self._find(path, None), ())

    def _read(self, path: pathlib.Path, chain: tuple[pathlib.Path, ...]) -> None:
        seen: dict[tuple[str, str, str], Binding] = {}
        chain = (*chain, path)
        text = path.read_text(encoding="utf-8")
        for statement in self._statements(text, str(path)):
            where = f"{path}:{statement.location.line_num}"
            if not isinstance(statement, config_parser.IncludeStatement):
                self._take(statement, where, seen)
                continue
            try:
                included = self._find(pathlib.Path(statement.filename), path.parent)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{where}: {error}") from None
            if included.resolve() in [p.resolve() for p in chain]:
                told = " -> ".join(map(str, (*chain, included)))
                raise ConfigError(f"{where}: a file includes itself: {told}")
            self._read(included, chain)

    def read_command_line(
        self, option: str, texts: Sequence[str], *, text_allowed: bool = False
    ) -> None:
        seen: dict[tuple[str, str, str], Binding] = {}
        for text in texts:
            separator = "." if text_allowed else " "
            where = f"{option}{separator}{text}"
            try:
                statements = list(self._statements(text, where, has_lines=False))
            except ConfigError:
                if not text_allowed or (binding := self._as_text(text, where)) is None:
                    raise
                self._store(binding, seen)
                continue
            for statement in statements:
                self._take(statement, where, seen)

    def _find(self, path: pathlib.Path, beside: pathlib.Path | None) -> pathlib.Path:
        folders = [pathlib.Path()] if beside is None else [beside, pathlib.Path()]
        candidates = [folder / path for folder in (*folders, *self._search_paths)]
        for candidate in candidates:
            if candidate.is_file():
                return pathlib.Path(os.path.normpath(candidate))
        tried = ", ".join(dict.fromkeys(str(c) for c in candidates))
        raise FileNotFoundError(f"gin file {path} not found (looked for {tried})")

    def _statements(self, text: str, where: str, *, has_lines: bool = True):
        def place(line: int | None) -> str:
            return f"{where}:{line}" if has_lines and line else where

        try:
            yield from config_parser.ConfigParser(text + "\n", _Delegate())
        except SyntaxError as error:
            raise ConfigError(f"{place(_line_of(error))}: {_reason(error)}") from None
        except config_parser.tokenize.TokenError as error:
            message, (line, _) = error.args
            raise ConfigError(f"{place(line)}: {message}") from None

    def _take(self, statement, where: str, seen: dict) -> None:
        if isinstance(statement, config_parser.BindingStatement):
            self._store(_bind(statement, where), seen)
        elif isinstance(statement, config_parser.BlockDeclaration):
            find_configurable(statement.selector, where)
        elif isinstance(statement, config_parser.ImportStatement):
            if statement.module.startswith("__gin__"):
                raise ConfigError(f"{where}: dynamic registration is not supported")
            try:
                importlib.import_module(statement.module)
            except ModuleNotFoundError as error:
                raise ConfigError(f"{where}: {error}") from None
            self.imports.append(statement.module)
        else:
            raise ConfigError(f"{where}: only bindings may stand here")

    def _store(self, binding: Binding, seen: dict) -> None:
        if binding.key in seen:
            first = seen[binding.key].where
            raise ConfigError(
                f"{binding.where}: {binding.label} is set twice, first at {first}"
            )
        seen[binding.key] = binding
        # A later setting also takes the later place in the order.
        if (replaced := self.bindings.pop(binding.key, None)) is not None:
            self.replaced.append(replaced)
        self.bindings[binding.key] = binding

    def _as_text(self, text: str, where: str) -> Binding | None:
        key, separator, value = text.partition("=")
        try:
            scope, selector, name = config_parser.parse_binding_key(key.strip())
        except (ValueError, IndexError):
            return None
        if not separator:
            return None
        statement = config_parser.BindingStatement(
            scope, selector, name, value.strip(), config_parser.Location(None, 1, 0, "")
        )
        binding = _bind(statement, where)
        if binding.selector != MACRO:
            wrapped = find_configurable(selector, where).wrapped
            if not accepts_text(annotations_of(wrapped).get(name, Any)):
                return None
        return binding


class _Delegate(config_parser.ParserDelegate):
    """Keeps references as written; they are looked up where they are built."""

    # Gin's class is annotated by its `pass`.
    def configurable_reference(  # pyrefly: ignore
        self, scoped_configurable_name: str, evaluate: bool
    ) -> Reference:
        *scopes, name = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), name, evaluate)

    def macro(self, macro_name: str) -> Macro:  # pyrefly: ignore
        return Macro(macro_name)


def _reason(error: SyntaxError) -> str:
    _, bare_word, token = error.msg.partition("Failed to parse token ")
    return f"{token} is no value (a string needs quotes)" if bare_word else error.msg


def _line_of(error: SyntaxError) -> int | None:
    # Gin passes its own location as the second argument.
    return error.lineno if isinstance(error.lineno, int) else None


def _bind(statement: config_parser.BindingStatement, where: str) -> Binding:
    scope, selector, name, value, _ = statement
    if not name:
        scope = f"{scope}/{selector}" if scope else selector
        return Binding(scope, MACRO, "value", value, where)
    configurable = find_configurable(selector, where)
    names = list(inspect.signature(configurable.wrapped).parameters)
    if name not in names:
        raise ConfigError(
            f"{where}: {selector} has no setting {name!r}{suggest(name, names)}"
        )
    return Binding(scope, configurable.selector, name, value, where)


def find_configurable(selector: str, where: str) -> gin.config.Configurable:
    """Gin's record of a name, or an error that says what was probably meant."""
    try:
        found = gin.config.ConfigurableReference(selector, False).configurable
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]}") from None
    except ValueError:
        found = None
    if found is None:
        hint = suggest(selector, registry.names())
        raise ConfigError(f"{where}: nothing is named {selector!r}{hint}")
    return found


def annotations_of(configurable: Any) -> dict[str, Any]:
    return typing.get_type_hints(configurable)

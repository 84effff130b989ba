"""Checks a value from a gin file against the annotation of the field it is for."""

from __future__ import annotations

import collections.abc
import types
import typing
from typing import Any


class Mismatch(Exception):
    """A value does not fit an annotation; the message says what would."""


_SEQUENCES = (tuple, list, collections.abc.Sequence, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)


def describe(annotation: Any) -> str:
    """A short spelling of an annotation for messages."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def coerce(value: Any, annotation: Any) -> Any:
    """Returns `value` in the form the annotation asks for.

    Lists become tuples, so that configs stay hashable, and an int where a float is
    wanted becomes one. Nothing else is converted: "16" is no int, True is no int.

    Args:
      value: what the file says, references already replaced by what they build.
      annotation: a resolved type annotation.

    Returns:
      The value to store.

    Raises:
      Mismatch: the value does not fit.
    """
    annotation = _unwrap(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, typing.TypeVar):
        return _freeze(value)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, args, annotation)
    if origin is typing.Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        raise Mismatch(f"allowed are {', '.join(map(repr, args))}, got {value!r}")
    if annotation is None or annotation is type(None):
        return _require(value is None, value, "None")
    if annotation is float:
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return _require(isinstance(value, float), value, "float")
    if annotation is int:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return _require(is_int, value, "int")
    base = origin or annotation
    if base in _SEQUENCES:
        return _coerce_sequence(value, args, annotation)
    if base in _MAPPINGS:
        _require(isinstance(value, dict), value, describe(annotation))
        key_type, value_type = args or (Any, Any)
        return {coerce(k, key_type): coerce(v, value_type) for k, v in value.items()}
    if base is collections.abc.Callable:
        return _require(callable(value), value, "a function")
    if base is type:
        return _require(isinstance(value, type), value, describe(annotation))
    return _require(isinstance(value, base), value, describe(annotation))


def accepts_text(annotation: Any) -> bool:
    """Whether a bare word given on the command line may be meant as a string."""
    annotation = _unwrap(annotation)
    if annotation in (str, Any):
        return True
    if typing.get_origin(annotation) is typing.Literal:
        return any(isinstance(arg, str) for arg in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(accepts_text, typing.get_args(annotation)))
    return False


def _unwrap(annotation: Any) -> Any:
    while True:
        if isinstance(annotation, typing.TypeAliasType):
            annotation = annotation.__value__
        elif typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


def _require(fits: bool, value: Any, wanted: str) -> Any:
    if not fits:
        raise Mismatch(f"expected {wanted}, got {type(value).__name__} {value!r}")
    return value


def _freeze(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    return value


def _coerce_union(value: Any, members: tuple[Any, ...], annotation: Any) -> Any:
    reasons = []
    fitting = []
    for member in members:
        try:
            fitting.append(coerce(value, member))
        except Mismatch as mismatch:
            if _unwrap(member) not in (None, type(None)):
                reasons.append(str(mismatch))
    if not fitting:
        if len(reasons) == 1:
            raise Mismatch(reasons[0])
        got = f"{type(value).__name__} {value!r}"
        raise Mismatch(f"expected {describe(annotation)}, got {got}")
    # `int | float` keeps an int an int, whichever is written first.
    return next((item for item in fitting if type(item) is type(value)), fitting[0])


def _coerce_sequence(value: Any, args: tuple[Any, ...], annotation: Any) -> Any:
    _require(isinstance(value, list | tuple), value, describe(annotation))
    if not args:
        return _freeze(value)
    if len(args) == 1 or args[-1] is Ellipsis:
        return tuple(coerce(item, args[0]) for item in value)
    if len(args) != len(value):
        raise Mismatch(f"expected {len(args)} items, got {len(value)}: {value!r}")
    return tuple(coerce(item, arg) for item, arg in zip(value, args, strict=True))

"""Frozen config dataclasses to JSON and back."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
from typing import Any

import jax.numpy as jnp
import numpy as np


_CLASS = "__class__"
_DTYPE = "__dtype__"


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        if isinstance(value, enum.Enum):
            raise ValueError(f"{where} is {value!r}, an enum has no JSON form here")
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        encoded = {_CLASS: f"{cls.__module__}:{cls.__qualname__}"}
        for field in dataclasses.fields(cls):
            if field.init:
                encoded[field.name] = _encode(
                    getattr(value, field.name), f"{where}.{field.name}"
                )
        return encoded
    if isinstance(value, tuple | list):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, np.dtype | type):
        try:
            return {_DTYPE: jnp.dtype(value).name}
        except TypeError as error:
            raise ValueError(f"{where} is {value!r}, which is no dtype") from error
    raise ValueError(f"{where} is {value!r}; a config holds plain values only")


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item, f"{where}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    if _DTYPE in value:
        return jnp.dtype(value[_DTYPE])
    fields = {k: _decode(v, f"{where}.{k}") for k, v in value.items() if k != _CLASS}
    if _CLASS not in value:
        return fields
    module, _, name = value[_CLASS].partition(":")
    # A checkpoint is data: it may name this package's configs and nothing else.
    if module.split(".")[0] != "jaxaccel":
        raise ValueError(f"{where} names {value[_CLASS]!r}, not a config of jaxaccel")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where}: this version has no {value[_CLASS]!r}") from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"{where} names {value[_CLASS]!r}, which is no dataclass")
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{where}: {cls.__name__} has no fields {unknown}")
    return cls(**fields)


def to_json(config: Any) -> str:
    """Writes a config dataclass, with the dataclasses and tuples inside it, as JSON.

    Args:
      config: frozen dataclass of plain values, dtypes, tuples and dataclasses.

    Returns:
      Indented JSON; `from_json` reads it back as an equal config.

    Raises:
      ValueError: a field holds something else; the message names it.
    """
    return json.dumps(_encode(config, type(config).__name__), indent=1)


def from_json(text: str) -> Any:
    """Reads what `to_json` wrote; lists come back as tuples.

    Raises:
      ValueError: the text names a class outside this package, or fields that this
        version of the class does not have.
    """
    return _decode(json.loads(text), "config")

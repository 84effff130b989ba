"""Efficiency techniques of recent LLM work in JAX: models, training, decoding."""

import importlib


_HOME = {
    "ModelOutput": "jaxaccel.models.decoder",
    "load_pretrained": "jaxaccel.models.hf",
    "save_pretrained": "jaxaccel.models.hf",
    "generate": "jaxaccel.decoding.generate",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

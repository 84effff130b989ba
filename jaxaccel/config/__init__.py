"""Experiments from gin files: the only package, with the command line, that uses gin.

experiment = load_experiment(["experiments/gdn/tiny.gin"], ["TrainConfig.steps=5"])
"""

import importlib


_HOME = {
    "ConfigError": "jaxaccel.config.gin_utils",
    "Experiment": "jaxaccel.config.registry",
    "experiment_text": "jaxaccel.config.writer",
    "load_experiment": "jaxaccel.config.gin_utils",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

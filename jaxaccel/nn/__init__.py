"""Layers: Flax NNX modules over the ops of `pallas_kernels`."""

import importlib


_HOME = {
    "Attention": "jaxaccel.nn.attention",
    "Engram": "jaxaccel.nn.engram",
    "GatedDeltaNet": "jaxaccel.nn.gated_deltanet",
    "LatentMoE": "jaxaccel.nn.latent_moe",
    "MLP": "jaxaccel.nn.mlp",
    "Mamba2": "jaxaccel.nn.mamba2",
    "MoE": "jaxaccel.nn.moe",
    "RMSNorm": "jaxaccel.nn.norm",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Benchmarks of whole systems; kernels have `python -m pallas_kernels.bench`."""

from __future__ import annotations

import importlib


_COMMANDS = {
    "step": "our training step against the same model in plain JAX",
    "decode": "decoding made fast in steps, each against the bandwidth limit",
    "ablation": "train configs that differ in one thing, over seeds",
    "curves": "one training run by several implementations, against the seeds' noise",
    "moe": "experts by loop, one-hot tables and one sort, and whole layers",
    "nemotron": "Nemotron 3 decoded at its size, layers of Super, a training step",
    "offload": "layer inputs in device or host memory, a stack's gradients",
    "engram": "tables trained by rows, tables on the host, what memory is good for",
    "ruler": "trains the model that caches of long contexts are asked with",
    "kv_cache": "caches of long contexts: accuracy, and throughput of decoding",
    "packing": "metadata once or in every layer; packed rows against padded ones",
    "recall": "pairs remembered by pure Gated DeltaNet and by a hybrid, over seeds",
    "render": "write the README's tables from experiments/results/",
}


def main(argv: list[str]) -> int:
    """Runs `jaxaccel bench NAME ...`; returns the exit status.

    Raises:
      ValueError: the benchmark is unknown.
    """
    name = argv[0] if argv else ""
    if name in ("", "-h", "--help"):
        print(f"usage: jaxaccel bench {{{','.join(_COMMANDS)}}} [options]\n")
        for command, does in _COMMANDS.items():
            print(f"  {command:10s}{does}")
        return 0
    if name not in _COMMANDS:
        raise ValueError(
            f"bench: {name!r} is unknown, allowed are {', '.join(_COMMANDS)}"
        )
    return importlib.import_module(f"{__name__}.{name}").main(argv[1:])

"""`jaxaccel bench nemotron`: Nemotron 3 at its published sizes on one device.

    jaxaccel bench nemotron --parts decode --batches 1,64 --json FILE
    jaxaccel bench nemotron --parts layers --json FILE
    jaxaccel bench nemotron --parts train --json FILE

"decode": Nano with random bfloat16 weights continues random prompts greedily; beside
the speed stands the time in which this card's memory moves the bytes that a token must
move. "layers": each kind of layer of Super, whose weights do not fit, at the rate of
this card's dense products. "train": a step of a model of a billion parameters, by the
kernels and by XLA, in turns. No speed is written for a wrong result, nor for one that
was not compared: layers are held against "xla" in the same call, training steps against
that of this call or of an earlier one in the file, of as many rounds and steps. Other
rows of the file stay in it.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxaccel.benchmarks import (
    nemotron_decode,
    nemotron_layers,
    nemotron_train,
    results,
)
from jaxaccel.models.nemotron_h import NemotronHConfig
from pallas_kernels._common.bench import ROOT, ceilings, stamp


PARTS = ("decode", "layers", "train")
TRAIN_PRESET = ROOT / "experiments" / "nemotron" / "train_1b.gin"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench nemotron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--parts", type=_names, default=PARTS, help=",".join(PARTS))
    parser.add_argument(
        "--size",
        default="published",
        choices=("published", "tiny"),
        help="tiny: a small model in place of Nano and Super, to try the command",
    )
    parser.add_argument(
        "--implementations",
        type=_names,
        default=("mosaic", "xla") if on_gpu else ("xla",),
        help="of the layers' ops, separated by commas; decode measures the first",
    )
    parser.add_argument(
        "--ops",
        type=_names,
        default=nemotron_decode.OPS,
        help=f"of decode: {','.join(nemotron_decode.OPS)}",
    )
    parser.add_argument("--batches", type=_numbers, default=(1, 64), help="of decode")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, of decode")
    parser.add_argument(
        "--new", type=int, default=64, help="tokens of a round, of decode"
    )
    parser.add_argument("--rounds", type=int, default=4, help="of decode and train")
    parser.add_argument("--tokens", type=int, default=8192, help="T of layers")
    parser.add_argument(
        "--kinds",
        type=_names,
        default=nemotron_layers.KINDS,
        help=f"of layers: {','.join(nemotron_layers.KINDS)}",
    )
    parser.add_argument(
        "--gin_file", action="append", help=f"of train, by default {TRAIN_PRESET.name}"
    )
    parser.add_argument("--gin_bindings", action="append", default=[], help="likewise")
    parser.add_argument("--steps", type=int, default=4, help="in a round of train")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument(
        "--json", type=pathlib.Path, required=True, help="where the rows go"
    )
    return parser


def _model(size: str, published: str) -> NemotronHConfig:
    """A published model with parameters as they are served, or a small one."""
    if size == "tiny":
        return NemotronHConfig.tiny(pattern="MEM*", param_dtype="bfloat16")
    return NemotronHConfig.published(published, param_dtype="bfloat16")


def _rows(
    options: argparse.Namespace, before: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    if "decode" in options.parts:
        yield from nemotron_decode.measure(
            _model(options.size, "nano"),
            options.size if options.size == "tiny" else "nano",
            implementation=options.implementations[0],
            batches=options.batches,
            sizes=nemotron_decode.Sizes(
                prompt=options.prompt, new=options.new, rounds=options.rounds
            ),
            limits=ceilings(),
            ops=options.ops,
        )
    if "layers" in options.parts:
        yield from nemotron_layers.measure(
            _model(options.size, "super"),
            options.size if options.size == "tiny" else "super",
            implementations=options.implementations,
            kinds=options.kinds,
            tokens=options.tokens,
            batches=options.batches,
            limits=ceilings(),
        )
    if "train" in options.parts:
        yield from nemotron_train.measure(
            options.gin_file or [TRAIN_PRESET],
            options.gin_bindings,
            implementations=options.implementations,
            rounds=options.rounds,
            steps=options.steps,
            before=before,
        )


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if something that was measured has no speed.

    Raises:
      ValueError: a part, a kind of layer or an implementation is unknown.
    """
    options = _parser().parse_args(argv)
    for option, names, allowed in (
        ("parts", options.parts, PARTS),
        ("kinds", options.kinds, nemotron_layers.KINDS),
        ("ops", options.ops, nemotron_decode.OPS),
        ("implementations", options.implementations, ("mosaic", "xla")),
    ):
        for name in names:
            if name not in allowed:
                raise ValueError(
                    f"bench nemotron: --{option} {name!r} is unknown, allowed are "
                    f"{', '.join(allowed)}"
                )
        if not names:
            raise ValueError(f"bench nemotron: --{option} names none")
    about, failed = stamp(options.commit), False
    for row in _rows(options, results.read(options.json)):
        failed = failed or row["note"].startswith("no speed")
        print(row, flush=True)
        # After each: a run that is cut short leaves what it measured.
        results.update(options.json, [{**row, **about}])
    return 1 if failed else 0

"""`jaxaccel bench kv_cache`: caches of long contexts, what they lose and how fast.

    jaxaccel bench kv_cache --only accuracy --model runs/ruler_h200 --sweep budget \\
        --gin_file experiments/kv_cache/ruler_h200.gin --json FILE
    jaxaccel bench kv_cache --only throughput \\
        --gin_file experiments/kv_cache/throughput_h200.gin --json FILE

Accuracy asks a model that `jaxaccel bench ruler` trained through every cache, and says
where dense attention fails too. Throughput decodes with layers of random weights over
caches that are filled on the device, without a prompt being read. Rows of what is not
measured again stay in the file, those of a run that is cut short too.
"""

from __future__ import annotations

import argparse
import pathlib

import jax

from jaxaccel.benchmarks import kv_cache_accuracy, kv_cache_throughput, results, ruler
from jaxaccel.benchmarks.step import add_options
from jaxaccel.config.gin_utils import load_config
from pallas_kernels._common.bench import stamp


PARTS = ("accuracy", "throughput")


KEYS = {
    "accuracy": ("sweep", "method", "setting", "question", "workload"),
    "throughput": ("method", "batch"),
}
"""What tells a part's rows apart."""


def _accuracy(options: argparse.Namespace) -> int:
    if options.model is None:
        raise ValueError(
            "bench kv_cache --only accuracy needs --model, the folder that "
            "`jaxaccel bench ruler` wrote"
        )
    config = load_config("RulerBenchConfig", options.gin_file, options.gin_bindings)
    sweeps = options.sweep.split(",") if options.sweep else kv_cache_accuracy.SWEEPS
    caches = list(kv_cache_accuracy.plan(config, sweeps))
    model = ruler.load(config, options.model)
    asker = kv_cache_accuracy.Asker(config, ruler.parts_of(config), model)
    about, rows = stamp(options.commit), []
    for asked in caches:
        found = asker.ask(asked)
        rows += [{**row, **about} for row in found]
        told = " ".join(f"{100 * r['accuracy']:.0f}" for r in found)
        print(f"{asked.sweep} {asked.method} {asked.setting:g}: {told}", flush=True)
        # After each cache: a later one may fail.
        results.update(options.json, rows, KEYS["accuracy"])
    print(kv_cache_accuracy.table(rows))
    return 0


def _throughput(options: argparse.Namespace) -> int:
    config = load_config("KVCacheBenchConfig", options.gin_file, options.gin_bindings)
    wanted = options.methods.split(",") if options.methods else tuple(config.methods)
    config = kv_cache_throughput.chosen(config, wanted)
    about, rows = stamp(options.commit), []
    for row in kv_cache_throughput.measure(config):
        rows.append({**row, **about})
        print(kv_cache_throughput.line(row), flush=True)
        results.update(options.json, rows, KEYS["throughput"])
        # Buffers of the last cache must be gone before the next is made.
        jax.clear_caches()
    return 1 if any(row["note"].startswith("no speed") for row in rows) else 0


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a cache has no speed, as it is wrong."""
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench kv_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--only", choices=PARTS, required=True)
    parser.add_argument("--model", type=pathlib.Path, help="of --only accuracy")
    parser.add_argument(
        "--sweep",
        default="",
        help=f"of --only accuracy, with commas: {', '.join(kv_cache_accuracy.SWEEPS)}",
    )
    parser.add_argument(
        "--methods", default="", help="of --only throughput, with commas; all of them"
    )
    options = parser.parse_args(argv)
    if options.only == "accuracy":
        return _accuracy(options)
    return _throughput(options)

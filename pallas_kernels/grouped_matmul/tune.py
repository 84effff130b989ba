"""Measures the tiles of `config_mosaic.CANDIDATES` and writes the table of the best.

    python -m pallas_kernels.grouped_matmul.tune --names qwen3_next_up,dense_64 \
        --json pallas_kernels/tuned/nvidia_h200/grouped_matmul.json

`--only "computing=3,cluster=2"` tries the heuristic's tile and those that have one of
these in their text, and no variants of the best. A tile whose result is not XLA's gets
no time. Sizes are those of the "perf" specs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_kernels._common import bench, trial, tuning
from pallas_kernels.grouped_matmul import api, config_mosaic, mosaic, specs
from pallas_kernels.grouped_matmul.config_mosaic import Config, Tile


PRODUCTS = tuple(field.name for field in dataclasses.fields(Config))


def _one(product: str, config: Config, x, w, sizes, dy) -> jax.Array:
    """y, dx or dw from the kernel."""
    if product == "forward":
        return mosaic.grouped_matmul(x, w, sizes, x.dtype, config)
    kernel = mosaic.data_gradient if product == "data" else mosaic.weight_gradient
    return kernel(x, w, sizes, dy, config)


def _exact(product: str, x, w, sizes, dy) -> jax.Array:
    """The same from XLA."""
    op = functools.partial(api.grouped_matmul, implementation="xla")
    if product == "forward":
        return op(x, w, sizes)
    if product == "data":
        return jax.vjp(lambda x: op(x, w, sizes), x)[1](dy)[0]
    return jax.vjp(lambda w: op(x, w, sizes), w)[1](dy)[0]


def _measured(
    product: str, tile: Tile, args: tuple[Any, ...], want: jax.Array
) -> float | None:
    """Milliseconds of one tile, `None` if it cannot run or its result is wrong."""
    config = dataclasses.replace(Config(), **{product: tile})
    fn = functools.partial(_one, product, config)
    return trial.milliseconds(tile, fn, args, want)


def _variants(best: Tile, product: str) -> Iterator[Tile]:
    """What may help the best tile a little."""
    yield dataclasses.replace(best, swizzled=not best.swizzled)
    yield dataclasses.replace(best, eager=not best.eager)
    if product == "weight":
        yield dataclasses.replace(best, tail_rows=72 - best.tail_rows)
    else:
        for panel in (4, 64):
            yield dataclasses.replace(best, panel=panel)


def tune(
    spec: specs.Spec,
    products: Sequence[str] = PRODUCTS,
    only: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """The best tiles of one size.

    Args:
      spec: the size.
      products: "forward", "data", "weight" or some of them.
      only: texts, one of which a tile must have in its own, the heuristic's aside; all
        tiles if there are none.

    Returns:
      Table key -> the tile's fields and its time "ms".
    """
    args = jax.jit(spec.arguments)(jax.random.key(0))
    sizes = {
        "rows": spec.rows,
        "experts": spec.experts,
        "in_dim": spec.in_dim,
        "out_dim": spec.out_dim,
    }
    entries = {}
    for product in products:
        want = jax.jit(functools.partial(_exact, product))(*args)
        print(f"{spec.name} {product}", flush=True)
        measure: Callable[[Tile], float | None] = functools.partial(
            _measured, product, args=args, want=want
        )
        guess = getattr(config_mosaic.heuristic(**sizes), product)
        tiles = dict.fromkeys((guess, *config_mosaic.CANDIDATES))
        if only:
            named = [t for t in tiles if any(text in str(t) for text in only)]
            tiles = dict.fromkeys((guess, *named))
        times = {t: ms for t in tiles if (ms := measure(t)) is not None}
        if not times:
            continue
        best = min(times, key=lambda tile: times[tile])
        for tile in () if only else _variants(best, product):
            if (ms := measure(tile)) is not None:
                times[tile] = ms
        best = min(times, key=lambda tile: times[tile])
        key = config_mosaic.table_key(product, **sizes)
        entries[key] = dataclasses.asdict(best) | {"ms": bench.digits(times[best])}
    return entries


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.grouped_matmul.tune"
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--specs", default="perf", help="ci, model or perf")
    parser.add_argument("--names", help="of specs, separated by commas; default all")
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--only", help="texts of tiles, one of them, by commas")
    options = parser.parse_args(argv)
    about = bench.stamp()
    entries: dict[str, dict[str, Any]] = {}
    for spec in specs.specs(options.specs):
        if options.names and spec.name not in options.names.split(","):
            continue
        only = options.only.split(",") if options.only else ()
        entries |= tune(spec, options.products.split(","), only)
        tuning.write(options.json, about, entries)


if __name__ == "__main__":
    main()

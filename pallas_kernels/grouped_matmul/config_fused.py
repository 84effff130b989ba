"""Launch parameters of the kernels that fuse an activation or its gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels._common import hw, tuning
from pallas_kernels.grouped_matmul import config_mosaic
from pallas_kernels.grouped_matmul.config_mosaic import (
    STEP,
    Config,
    Tile,
    table_key,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """How the products of an expert's two layers are cut; K and N are those of each.

    Attributes:
      up, down: the two forward products.
      back: the gradient of what lies between them, from that of the second.
      data: the gradient of the rows.
      weight_in, weight_out: the gradients of the two matrices.
    """

    up: Tile
    down: Tile
    back: Tile
    data: Tile
    weight_in: Tile
    weight_out: Tile


def is_for_pairs(tile: Tile) -> bool:
    """Whether a warpgroup's columns are those of two products, whole lines of each."""
    return tile.part[1] % 128 == 0


def saved_bytes(tile: Tile, parts: int) -> int:
    """Shared memory for what the forward saved of a tile's rows and columns."""
    rows, columns = tile.part
    return tile.computing * parts * rows * columns * 2


def _stages(least: Tile, taken: int = 0) -> int:
    """As many pieces as fit beside `taken` bytes, at most eight."""
    piece = STEP * (least.block_m + least.block_n) * 2
    room = hw.H200.smem_bytes - taken - least.smem_bytes() + least.stages * piece
    return min(8, room // piece) // least.rings * least.rings


def _tile(block_m: int, block_n: int, split: str, parts: int = 0, **more: Any) -> Tile:
    """With as many stages as fit beside `parts` tiles of what was saved."""
    tile = Tile(block_m=block_m, block_n=block_n, split=split, **more)
    return dataclasses.replace(tile, stages=_stages(tile, saved_bytes(tile, parts)))


# What a tuning run tries for the up product of a gated activation.
PAIRS = (
    _tile(128, 256, "rows"),
    _tile(128, 256, "columns"),
    _tile(128, 128, "rows"),
    _tile(128, 128, "tiles"),
    _tile(64, 256, "columns"),
    _tile(64, 256, "tiles"),
    _tile(64, 128, "tiles"),
    _tile(192, 256, "rows", computing=3, eager=True),
    _tile(192, 256, "rows", computing=3, eager=True, cluster=2),
    _tile(192, 256, "columns", eager=True),
)


def backward_candidates(parts: int) -> tuple[Tile, ...]:
    """What a tuning run tries for the gradient between the products."""
    least = (
        Tile(block_m=128, block_n=128),
        Tile(block_m=128, block_n=192),
        Tile(block_m=128, block_n=256),
        Tile(block_m=128, block_n=128, split="columns"),
        Tile(block_m=64, block_n=128, split="columns"),
        Tile(block_m=64, block_n=256, split="columns"),
        Tile(block_m=64, block_n=128, split="tiles"),
        Tile(block_m=128, block_n=128, split="tiles"),
        Tile(block_m=192, block_n=128, computing=3, eager=True),
        Tile(block_m=192, block_n=128, computing=3, eager=True, cluster=2),
    )
    stages = [_stages(tile, saved_bytes(tile, parts)) for tile in least]
    return tuple(
        dataclasses.replace(tile, stages=number)
        for tile, number in zip(least, stages, strict=True)
        if number >= 2 * tile.rings
    )


def _pair(*, rows: int, experts: int, in_dim: int, out_dim: int) -> Tile:
    if rows <= 64 * experts:
        # A block's 256 columns are 128 of the result.
        return dataclasses.replace(
            config_mosaic.few_rows(rows, experts, out_dim), block_n=256, stages=4
        )
    # Writing takes about as long as a short sum: it must overlap.
    return _tile(128, 128, "tiles") if in_dim <= 512 else _tile(128, 256, "rows")


def _measured(product: str, **sizes: int) -> Tile | None:
    found = tuning.lookup("grouped_matmul", table_key(product, **sizes))
    if found is None:
        return None
    names = {field.name for field in dataclasses.fields(Tile)}
    return Tile(**{name: value for name, value in found.items() if name in names})


def with_pairs(config: Config, **sizes: int) -> Config:
    """The config of one product with a gated activation, from that of one without.

    Args:
      config: what `config_mosaic.pick` says.
      **sizes: rows, experts, in_dim, out_dim: M, E, K, N.
    """
    tile = _measured("pair", **sizes) or _pair(**sizes)
    return dataclasses.replace(config, forward=tile)


def backward_tile(parts: int, **sizes: int) -> Tile:
    """The tile of the gradient between the products, measured or guessed.

    Args:
      parts: products of the activation, 1 or 2.
      **sizes: rows, experts, in_dim, out_dim: M, E, F, D.
    """
    if (tile := _measured(f"back{parts}", **sizes)) is not None:
        return tile
    if sizes["rows"] <= 64 * sizes["experts"]:
        return _tile(64, 128, "columns", parts)
    return _tile(128, 128, "rows", parts)


def pick(*, rows: int, experts: int, d_model: int, d_ff: int, parts: int) -> MlpConfig:
    """The measured tiles where there are some, else a guess.

    Args:
      rows, experts: M, E.
      d_model, d_ff: D, F.
      parts: products of the activation, 1 or 2.
    """
    group = {"rows": rows, "experts": experts}
    sizes = {
        "in": group | {"in_dim": d_model, "out_dim": parts * d_ff},
        "out": group | {"in_dim": d_ff, "out_dim": d_model},
    }
    first, second = (config_mosaic.pick(**sizes[name]) for name in ("in", "out"))
    if parts == 2:
        first = with_pairs(first, **sizes["in"])
    return MlpConfig(
        up=first.forward,
        down=second.forward,
        back=backward_tile(parts, **sizes["out"]),
        data=first.data,
        weight_in=first.weight,
        weight_out=second.weight,
    )

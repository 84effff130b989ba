"""Quantised tensors of a checkpoint, read as if they had been stored as numbers."""

from __future__ import annotations

from typing import Protocol

import ml_dtypes
import numpy as np

from jaxaccel.models.safetensors_io import TensorSpec
from jaxaccel.quant import mxfp4


_BLOCKS, _SCALES = "_blocks", "_scales"


class Reader(Protocol):
    """What gives the tensors of a folder, one at a time."""

    specs: dict[str, TensorSpec]

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor."""
        ...


class DequantizingReader:
    """A reader in which MXFP4 pairs are single tensors.

    `NAME_blocks` u8[E, out, in / 32, 16] and `NAME_scales` u8[E, out, in / 32] become
    `NAME` bf16[E, in, out], every number exact. All else is as in `reader`.

    Args:
      reader: the tensors as stored.

    Raises:
      ValueError: the two tensors of a pair do not fit each other.
    """

    def __init__(self, reader: Reader):
        self._reader = reader
        self._quantized: set[str] = set()
        self.specs = dict(reader.specs)
        for name, blocks in reader.specs.items():
            base = name.removesuffix(_BLOCKS)
            scales = reader.specs.get(base + _SCALES)
            if base == name or scales is None:
                continue
            shapes = blocks.shape, scales.shape
            if len(shapes[1]) != 3 or shapes[0] != (*shapes[1], 16):
                raise ValueError(
                    f"{name} is {shapes[0]} and {base + _SCALES} {shapes[1]}, expected "
                    "(E, out, in / 32, 16) and (E, out, in / 32)"
                )
            del self.specs[name], self.specs[base + _SCALES]
            experts, d_out, count = scales.shape
            self.specs[base] = TensorSpec(
                (experts, count * mxfp4.BLOCK_SIZE, d_out),
                np.dtype(ml_dtypes.bfloat16),
            )
            self._quantized.add(base)

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, in the dtype that `specs` says."""
        if name not in self._quantized:
            return self._reader.read(name)
        blocks = self._reader.read(name + _BLOCKS)
        scales = self._reader.read(name + _SCALES)
        return mxfp4.dequantize(blocks, scales).swapaxes(-1, -2)

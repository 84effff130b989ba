"""Reading and writing safetensors folders one tensor at a time.

A folder holds `model.safetensors`, or shards named by
`model.safetensors.index.json`, and perhaps further `*.safetensors` files beside them
(a multi-token-prediction block is often shipped as `mtp.safetensors`). This is the
only file that knows the format.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence

import ml_dtypes
import numpy as np
import safetensors


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MTP_NAME = "mtp.safetensors"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What the header says of one tensor.

    Attributes:
      shape: the shape as stored.
      dtype: the numpy dtype as stored (bfloat16 through ml_dtypes).
    """

    shape: tuple[int, ...]
    dtype: np.dtype


class CheckpointReader:
    """The tensors of a folder; only headers are read until a tensor is asked for.

    Args:
      folder: holds a single file or a sharded index.

    Raises:
      FileNotFoundError: no safetensors file, or a shard that the index names is gone.
      ValueError: the index places a tensor in a shard that lacks it, a file is
        damaged, or a tensor has a dtype that this loader does not take.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._folder = pathlib.Path(folder)
        self._files: dict[str, safetensors.safe_open] = {}
        self._file_of: dict[str, str] = {}
        self.specs: dict[str, TensorSpec] = {}
        for file in _files_of(self._folder):
            self._open(file)
        index = self._folder / INDEX_NAME
        if index.is_file():
            self._check_index(index)

    def _open(self, file: str) -> None:
        path = self._folder / file
        if not path.is_file():
            raise FileNotFoundError(f"{INDEX_NAME} names {file!r}, missing at {path}")
        try:
            handle = safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is not a whole safetensors file: {error}"
            ) from error
        self._files[file] = handle
        for name in handle.keys():  # noqa: SIM118 (safe_open is no mapping)
            view = handle.get_slice(name)
            code = view.get_dtype()
            if code not in _DTYPES:
                raise ValueError(
                    f"{name} in {path} has dtype {code}, known are {sorted(_DTYPES)}"
                )
            if name in self._file_of:
                raise ValueError(f"{name} is in both {self._file_of[name]} and {file}")
            self._file_of[name] = file
            self.specs[name] = TensorSpec(tuple(view.get_shape()), _DTYPES[code])

    def _check_index(self, index: pathlib.Path) -> None:
        wrong = [
            f"{name} in {file}"
            for name, file in json.loads(index.read_text())["weight_map"].items()
            if self._file_of.get(name) != file
        ]
        if wrong:
            raise ValueError(f"{index} promises tensors that are not there: {wrong}")

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor, in the dtype it is stored in."""
        return self._files[self._file_of[name]].get_tensor(name)


def _files_of(folder: pathlib.Path) -> list[str]:
    index = folder / INDEX_NAME
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (folder / SINGLE_NAME).is_file():
        files = [SINGLE_NAME]
    else:
        raise FileNotFoundError(f"no {SINGLE_NAME} and no {INDEX_NAME} in {folder}")
    if MTP_NAME not in files and (folder / MTP_NAME).is_file():
        files.append(MTP_NAME)
    return files


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """A tensor that is made when its turn to be written comes.

    Attributes:
      name: the name in the file.
      spec: its shape and dtype, known before it is made.
      make: returns the array, of exactly that shape and dtype.
    """

    name: str
    spec: TensorSpec
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.spec.shape, dtype=np.int64)) * self.spec.dtype.itemsize


def write_checkpoint(
    folder: str | os.PathLike[str],
    tensors: Sequence[TensorSource],
    config: dict,
    *,
    max_shard_bytes: int,
) -> None:
    """Writes tensors and config.json; readers never see a half-written file.

    Each file is written beside its place, flushed to the disk and renamed. The
    config goes last, so a folder with a config has all its tensors.

    Args:
      folder: made if missing; an earlier checkpoint in it is replaced.
      tensors: in the order of writing; one at a time is held in memory.
      config: what config.json will hold.
      max_shard_bytes: tensors beyond it go to further shards with an index.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(tensors, max_shard_bytes))
    count = len(shards)
    names = (
        [SINGLE_NAME]
        if count == 1
        else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    # Every part is on the disk under a temporary name before the first rename: a
    # full disk then leaves the earlier checkpoint as it was.
    staged: list[tuple[pathlib.Path, pathlib.Path]] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            staged.append((_stage(folder, _file_chunks(shard)), folder / name))
        if count > 1:
            index = {
                "metadata": {"total_size": sum(t.nbytes for t in tensors)},
                "weight_map": {
                    tensor.name: name
                    for name, shard in zip(names, shards, strict=True)
                    for tensor in shard
                },
            }
            staged.append((_stage(folder, [_json_bytes(index)]), folder / INDEX_NAME))
        staged.append((_stage(folder, [_json_bytes(config)]), folder / "config.json"))
        for temporary, final in staged:
            os.replace(temporary, final)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
    _remove_stale(folder, set(names), sharded=count > 1)


def _shards(
    tensors: Sequence[TensorSource], max_shard_bytes: int
) -> Iterator[list[TensorSource]]:
    shard: list[TensorSource] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _file_chunks(tensors: Sequence[TensorSource]) -> Iterator[bytes | memoryview]:
    """The bytes of one file: u64 header length, JSON header, the tensors end to end."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _CODES[tensor.spec.dtype],
            "shape": list(tensor.spec.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to eight bytes
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors:
        array = np.ascontiguousarray(tensor.make())
        array = array.reshape(tensor.spec.shape)  # ascontiguousarray lifts scalars
        if array.dtype != tensor.spec.dtype:
            raise ValueError(
                f"{tensor.name} was announced as {tensor.spec.dtype}, got {array.dtype}"
            )
        yield array.tobytes()


def _json_bytes(value: dict) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _stage(
    folder: pathlib.Path, chunks: Iterator[bytes | memoryview] | list[bytes]
) -> pathlib.Path:
    descriptor, name = tempfile.mkstemp(prefix=".saving-", dir=folder)
    path = pathlib.Path(name)
    whole = False
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        path.chmod(0o644)  # mkstemp gives 0600, which others could not read
        whole = True
    finally:
        if not whole:
            path.unlink(missing_ok=True)
    return path


def _remove_stale(folder: pathlib.Path, written: set[str], *, sharded: bool) -> None:
    """Drops files of an earlier checkpoint that a reader would take for this one's."""
    for path in [*folder.glob("model*.safetensors"), folder / MTP_NAME]:
        if path.name not in written:
            path.unlink(missing_ok=True)
    if not sharded:
        (folder / INDEX_NAME).unlink(missing_ok=True)

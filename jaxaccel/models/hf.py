"""Checkpoint folders of Hugging Face models, in and out, tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.gpt_oss import GptOssConfig
from jaxaccel.models.hf_config import read_config
from jaxaccel.models.names import Entry, Region, stored_shape
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.models.quantized import DequantizingReader, Reader
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.qwen3_next import Qwen3NextConfig
from jaxaccel.models.qwen_hybrid import QwenHybridConfig
from jaxaccel.models.safetensors_io import (
    CheckpointReader,
    TensorSource,
    TensorSpec,
    write_checkpoint,
)
from jaxaccel.nn.router import MoEConfig


_LOG = logging.getLogger(__name__)

type FamilyConfig = QwenHybridConfig | GptOssConfig | NemotronHConfig

FAMILIES: dict[str, type[FamilyConfig]] = {
    family.MODEL_TYPE: family
    for family in (
        *(Qwen3NextConfig, Qwen3_5TextConfig),
        *(GptOssConfig, NemotronHConfig),
    )
}
_HEAD = "lm_head.weight"


def model_config(raw: Mapping[str, Any]) -> FamilyConfig:
    """The config of the family that a parsed config.json names.

    Raises:
      NotImplementedError: no such family here.
      ValueError: see the family's `from_hf`.
    """
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise NotImplementedError(
            f"model_type is {model_type!r}, supported: {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type].from_hf(raw)


def family_config(config: DecoderConfig) -> FamilyConfig:
    """The config of the family whose checkpoints can hold `config`.

    Raises:
      ValueError: none can; the message names what they cannot say.
    """
    if config.single_part:
        return NemotronHConfig.from_decoder(config)
    if not isinstance(config.mlp, MoEConfig):
        return Qwen3_5TextConfig.from_decoder(config)
    if config.gdn is None:
        return GptOssConfig.from_decoder(config)
    return Qwen3NextConfig.from_decoder(config)


def load_pretrained(
    folder: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    implementation: Any = None,
) -> Decoder:
    """Builds the model of a checkpoint folder.

    The host holds one parameter at a time beside the model itself.

    Args:
      folder: has config.json and safetensors, in one file or in shards with an index;
        a prediction block (`mtp.*`) is loaded where the tensors are there. Experts in
        MXFP4 (`*_blocks`, `*_scales`) become bfloat16, which holds them exactly.
      dtype: of computation and parameters; those that the model keeps in f32 (decay,
        router) are f32 under any. `None` takes the dtypes of the files.
      implementation: of the ops, see `DecoderConfig`.

    Returns:
      The model.

    Raises:
      FileNotFoundError: config.json or tensors are missing.
      ValueError: names are missing or unexpected, or shapes differ; all are listed.
      NotImplementedError: the config asks for what no model here computes.
    """
    reader = DequantizingReader(CheckpointReader(folder))
    config = _config_of(folder, reader)
    config = dataclasses.replace(config, implementation=implementation)
    if dtype is not None:
        name = jnp.dtype(dtype).name
        config = dataclasses.replace(config, dtype=name, param_dtype=name)
    decoder_config = config.decoder()
    # Shapes only: no initial weights are drawn to be thrown away.
    model = nnx.eval_shape(lambda: Decoder(decoder_config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    variables = _variables(state)
    entries = config.name_table().entries()
    sources = _sources(entries)
    _check(entries, variables, reader, tied=config.tie_embeddings)
    filled = {}
    for path, variable in variables.items():
        abstract = variable.get_value()
        stored = _stored_dtype(sources[path], reader)
        # What must be f32 is so in `abstract`; otherwise a file's finer dtype is kept.
        held = abstract.dtype if dtype is not None else _finer(abstract.dtype, stored)
        # `jnp.asarray` compiles a program for each shape, and copies on the device.
        value = jax.device_put(_assemble(abstract.shape, held, sources[path], reader))
        loaded = variable.replace(value)
        if dtype is None and stored != held:
            # Saving must give back the dtype that came in.
            loaded.set_metadata(stored_dtype=stored.name)
        filled[path] = loaded
    flat = [(path, filled[_dotted(path)]) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def save_pretrained(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    extra_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint folder that `load_pretrained` and transformers read.

    A model loaded with `dtype=None` and left alone gives back the names, dtypes and
    bytes of every tensor; one that was stored in MXFP4 is saved as the bfloat16 that
    it was loaded as. The prediction block goes into the same files.

    Args:
      model: any decoder that one of `FAMILIES` can express.
      folder: made if missing; an earlier checkpoint there is replaced, each file in
        one step, after all of the new ones are on the disk.
      max_shard_bytes: beyond it there are several files and an index.
      extra_config: further keys of config.json, such as `eos_token_id`; they do not
        replace those that describe the model.

    Raises:
      ValueError: no family's checkpoints can say what the model is.
    """
    config = family_config(model.config)
    state = nnx.state(model)
    write_checkpoint(
        folder,
        _tensor_sources(config, state),
        {**(extra_config or {}), **config.to_hf()},
        max_shard_bytes=max_shard_bytes,
    )


def checkpoint_tensors(
    config: FamilyConfig, state: nnx.State
) -> Iterator[tuple[str, np.ndarray]]:
    """Gives the tensors of a state under their names in a checkpoint.

    Args:
      config: of the model that the state belongs to.
      state: its parameters, or anything shaped like them, such as gradients.

    Yields:
      Name and array, one at a time.
    """
    for source in _tensor_sources(config, state):
        yield source.name, source.make()


def _config_of(folder: str | os.PathLike[str], reader: Reader) -> FamilyConfig:
    raw = read_config(folder)
    if raw.get("dtype") is None and raw.get("torch_dtype") is None:
        for name in ("model.embed_tokens.weight", "backbone.embeddings.weight"):
            if name in reader.specs:
                raw = {**raw, "dtype": reader.specs[name].dtype.name}
    # The files decide: transformers drops the block's tensors and keeps its key, and
    # hub checkpoints of Qwen3-Next have the tensors and no key.
    found = int(any(name.startswith("mtp.") for name in reader.specs))
    key = "num_nextn_predict_layers"
    announced = bool(raw.get(key))
    if raw.get("model_type") == NemotronHConfig.MODEL_TYPE:
        raw = {**raw, key: max(1, raw.get(key) or 0) if found else 0}
    config = model_config(raw)
    if isinstance(config, QwenHybridConfig):
        announced = bool(config.num_mtp_layers)
        config = dataclasses.replace(config, num_mtp_layers=found)
    if announced and not found:
        _LOG.warning("config.json announces a prediction block, %s has none", folder)
    return config


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _variables(state: nnx.State) -> dict[str, nnx.Variable]:
    return {_dotted(path): variable for path, variable in nnx.to_flat_state(state)}


def _sources(entries: list[Entry]) -> dict[str, list[tuple[Entry, int]]]:
    """For each of our parameters, the entries that fill it and which piece does."""
    found: dict[str, list[tuple[Entry, int]]] = {}
    for entry in entries:
        for piece, region in enumerate(entry.regions):
            found.setdefault(region.path, []).append((entry, piece))
    return found


def _check(
    entries: list[Entry],
    variables: Mapping[str, nnx.Variable],
    reader: Reader,
    *,
    tied: bool,
) -> None:
    """Compares names and shapes before anything is read.

    Raises:
      ValueError: lists all that is missing, unexpected or of another shape.
    """
    shapes = {path: variable.get_value().shape for path, variable in variables.items()}
    expected = {entry.name: stored_shape(entry, shapes) for entry in entries}
    present = set(reader.specs)
    if tied and _HEAD in present:
        _LOG.info("%s is stored, but the embedding is tied: not read", _HEAD)
        present.remove(_HEAD)
    problems = [f"missing: {name}" for name in sorted(set(expected) - present)]
    problems += [f"unexpected: {name}" for name in sorted(present - set(expected))]
    for name in sorted(present & set(expected)):
        if reader.specs[name].shape != expected[name]:
            problems.append(
                f"shape: {name} is {reader.specs[name].shape}, expected "
                f"{expected[name]}"
            )
    if problems:
        raise ValueError(
            f"{len(problems)} tensors do not fit the config:\n  "
            + "\n  ".join(problems)
        )


def _stored_dtype(sources: list[tuple[Entry, int]], reader: Reader) -> np.dtype:
    dtypes = {reader.specs[entry.name].dtype for entry, _ in sources}
    found = dtypes.pop()
    for other in dtypes:
        found = _finer(found, other)
    return found


def _finer(one: np.dtype, other: np.dtype) -> np.dtype:
    """The dtype that holds values of both; f32 for float16 beside bfloat16."""
    one, other = np.dtype(one), np.dtype(other)
    if one == other:
        return one
    if one.itemsize == other.itemsize:
        return np.dtype(np.float32)
    return max(one, other, key=lambda dtype: dtype.itemsize)


def _assemble(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sources: list[tuple[Entry, int]],
    reader: Reader,
) -> np.ndarray:
    """Reads one parameter, all layers and experts of it."""
    whole = np.empty(shape, dtype)
    for entry, piece in sources:
        stored = reader.read(entry.name)
        whole[entry.regions[piece].index] = entry.layout.load(stored)[piece]
    return whole


def _tensor_sources(config: FamilyConfig, state: nnx.State) -> list[TensorSource]:
    variables = _variables(state)
    shapes = {path: variable.get_value().shape for path, variable in variables.items()}
    host = _HostCopies(variables)
    entries = config.name_table().entries()
    nameless = sorted(set(variables) - set(_sources(entries)))
    if nameless:
        raise ValueError(
            f"a {config.MODEL_TYPE} checkpoint has no place for {nameless}"
        )
    found = []
    for entry in entries:
        variable = variables[entry.regions[0].path]
        dtype = np.dtype(variable.get_value().dtype)
        if variable.has_metadata("stored_dtype"):
            dtype = jnp.dtype(variable.get_metadata("stored_dtype"))
        spec = TensorSpec(stored_shape(entry, shapes), dtype)
        found.append(
            TensorSource(entry.name, spec, functools.partial(host.make, entry, dtype))
        )
    return found


class _HostCopies:
    """Parameters brought to the host one layer at a time."""

    def __init__(self, variables: Mapping[str, nnx.Variable]):
        self._variables = variables
        self._layer: tuple[str, int] | None = None
        self._held: dict[str, np.ndarray] = {}

    def make(self, entry: Entry, dtype: np.dtype) -> np.ndarray:
        pieces = tuple(self._piece(region) for region in entry.regions)
        return entry.layout.save(pieces).astype(dtype, copy=False)

    def _piece(self, region: Region) -> np.ndarray:
        value = self._variables[region.path].get_value()
        head, position = region.path.split(".")[:2]
        if head != "layers":
            return np.asarray(value)[region.index]
        period, *index = region.index
        layer = (position, period)
        if layer != self._layer:
            # Entries come layer by layer: what the last one left is done with.
            self._layer, self._held = layer, {}
        if region.path not in self._held:
            self._held[region.path] = np.asarray(value[period])
        return self._held[region.path][tuple(index)]

"""Checkpoints: arrays through orbax, everything else as plain files beside them.

```
<workdir>/checkpoints/00001000/
  model/         parameters and buffers
  ema/           running mean of the parameters, if the run keeps one
  training/      optimizer state, step, RNG
  metadata.json  names, shapes and dtypes; model config; data state; metrics; progress
  tokenizer.json
  config.gin     text that reproduces the run, if the caller gave one
```
A folder appears under its final name only when it is complete. One that is replaced
is called `.00001000.old` until the new one has its name, and is found under that name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxaccel.core.config_json import from_json, to_json
from jaxaccel.core.tree import ModelParts, model_parts, path_names
from jaxaccel.data.tokenizer import load_tokenizer
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder
from jaxaccel.training.step import TrainState


FORMAT = 1
BEST_METRIC = "nats_per_byte"
_METADATA = "metadata.json"
_OLD = ".old"
_MODEL_FIELDS = ("params", "buffers")
_SHOWN_DIFFERENCES = 12
# How the model's function is computed, not which function it is.
_FREE_FIELDS = ("implementation", "remat_policy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointExtras:
    """What a checkpoint holds besides arrays.

    Attributes:
      model_config: the decoder's config.
      tokenizer: the tokenizer of the run.
      data_state: JSON-able state of the data iterator.
      config_text: text that reproduces the run, or `None`.
      metrics: figures of the last evaluation; the lowest "nats_per_byte" is the best
        checkpoint.
      progress: figures that add up over the lives of a run.
    """

    model_config: DecoderConfig
    tokenizer: Any
    data_state: dict[str, Any]
    config_text: str | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    progress: dict[str, float] = dataclasses.field(default_factory=dict)


def _named_arrays(state: TrainState) -> dict[str, jax.Array]:
    """All arrays of a state by path; typed keys as their u32 data."""
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = _key_data(leaf)
        named["/".join(path_names(path))] = leaf
    return named


def _key_data(key):
    if not isinstance(key, jax.ShapeDtypeStruct):
        return jax.random.key_data(key)
    data = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)


def _group(name: str) -> str:
    """The folder that an array goes to."""
    field = name.partition("/")[0]
    if field in _MODEL_FIELDS:
        return "model"
    return "ema" if field == "ema" else "training"


def _by_group(named: dict[str, Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for name, array in named.items():
        groups.setdefault(_group(name), {})[name] = array
    return groups


def _describe(named: dict[str, Any]) -> dict[str, list]:
    return {name: [list(x.shape), jnp.dtype(x.dtype).name] for name, x in named.items()}


def _orbax():
    # Slow to import, and `import jaxaccel` must not pay for it.
    import orbax.checkpoint as ocp

    return ocp


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _step_folders(folder: pathlib.Path) -> Iterator[tuple[int, pathlib.Path]]:
    if not folder.is_dir():
        return
    found = {}
    # Names with a dot sort first, so that a final name wins.
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith(".") and name.endswith(_OLD):
            name = name[1 : -len(_OLD)]
        if name.isdecimal() and (path / _METADATA).is_file():
            found[int(name)] = path
    yield from sorted(found.items())


def repair_checkpoints(folder: pathlib.Path) -> None:
    """Puts right what a killed run left half done; one process may call this."""
    for stale in folder.glob(".*.tmp"):
        shutil.rmtree(stale)
    for old in folder.glob(f".*{_OLD}"):
        final = folder / old.name[1 : -len(_OLD)]
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


def _publish(draft: pathlib.Path, final: pathlib.Path) -> None:
    """Gives a complete draft its name; at every moment a complete one is found."""
    old = final.with_name(f".{final.name}{_OLD}")
    if final.exists():
        final.rename(old)
    draft.rename(final)
    if old.exists():
        shutil.rmtree(old)


def latest_checkpoint(folder: str | os.PathLike[str]) -> pathlib.Path | None:
    """The newest complete checkpoint in a folder of checkpoints."""
    found = list(_step_folders(pathlib.Path(folder)))
    return found[-1][1] if found else None


def best_checkpoint(folder: str | os.PathLike[str]) -> pathlib.Path | None:
    """The checkpoint with the lowest held-out nats per byte; `None` if none has it."""
    scored = []
    for step, path in _step_folders(pathlib.Path(folder)):
        score = read_metadata(path)["metrics"].get(BEST_METRIC)
        if score is not None and np.isfinite(score):
            scored.append((score, step, path))
    return min(scored)[2] if scored else None


def find_checkpoint(path: str | os.PathLike[str]) -> pathlib.Path:
    """The checkpoint that a path means.

    Args:
      path: a checkpoint, a folder of checkpoints, or a workdir; of several
        checkpoints the newest.

    Returns:
      The folder of one checkpoint.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
    """
    path = pathlib.Path(path)
    if (path / _METADATA).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if found := latest_checkpoint(folder):
            return found
    raise FileNotFoundError(f"{path} holds no complete checkpoint")


def read_metadata(checkpoint: pathlib.Path) -> dict[str, Any]:
    """The `metadata.json` of a checkpoint.

    Raises:
      ValueError: it was written in a format that this version cannot read.
    """
    metadata = json.loads((checkpoint / _METADATA).read_text(encoding="utf-8"))
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{checkpoint} has format {metadata.get('format')!r}, expected {FORMAT}"
        )
    return metadata


def save_checkpoint(
    folder: str | os.PathLike[str],
    state: TrainState,
    extras: CheckpointExtras,
    *,
    keep: int = 2,
) -> pathlib.Path:
    """Writes a checkpoint, then removes old ones.

    All processes of a run must call this.

    Args:
      folder: of all checkpoints of the run; shared by all processes.
      state: what to save.
      extras: what to save besides.
      keep: newest checkpoints kept; the best one is kept besides.

    Returns:
      The folder of the checkpoint.

    Raises:
      OSError: it could not be written, the disk being full for one. What was written
        of it is removed, and older checkpoints are as they were.
    """
    folder = pathlib.Path(folder).absolute()
    named = _named_arrays(state)
    step = int(state.step)
    final = folder / f"{step:08d}"
    draft = folder / f".{step:08d}.tmp"
    is_writer = jax.process_index() == 0
    try:
        if is_writer:
            _check_space(folder, named)
            repair_checkpoints(folder)
            draft.mkdir(parents=True)
        _barrier(f"checkpoint {step} begins")
        ocp = _orbax()
        for name, arrays in _by_group(named).items():
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(draft / name, args=ocp.args.PyTreeSave(arrays))
        if is_writer:
            _write_files(draft, step, named, extras)
            _publish(draft, final)
        _barrier(f"checkpoint {step} ends")
    except (OSError, ValueError) as error:
        # orbax tells a failed write as ValueError.
        if is_writer:
            shutil.rmtree(draft, ignore_errors=True)
            repair_checkpoints(folder)
        last = latest_checkpoint(folder)
        raise OSError(
            f"could not write checkpoint {final}: {error}; "
            f"the last complete one is {last or 'none'}"
        ) from error
    if is_writer:
        _prune(folder, keep)
    return final


def _check_space(folder: pathlib.Path, named: dict[str, jax.Array]) -> None:
    needed = sum(x.size * x.dtype.itemsize for x in named.values())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it needs {needed} bytes, the disk has {free} left")


def _write_files(
    draft: pathlib.Path, step: int, named: dict[str, Any], extras: CheckpointExtras
) -> None:
    metadata = {
        "format": FORMAT,
        "step": step,
        "arrays": _describe(named),
        "model_config": json.loads(to_json(extras.model_config)),
        "tokenizer": extras.tokenizer.fingerprint,
        "data_state": extras.data_state,
        "metrics": extras.metrics,
        "progress": extras.progress,
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
    }
    extras.tokenizer.save(draft / "tokenizer.json")
    if extras.config_text is not None:
        (draft / "config.gin").write_text(extras.config_text, encoding="utf-8")
    (draft / _METADATA).write_text(json.dumps(metadata, indent=1), encoding="utf-8")


def _prune(folder: pathlib.Path, keep: int) -> None:
    paths = [path for _, path in _step_folders(folder)]
    kept = {*paths[-keep:], best_checkpoint(folder)}
    for path in paths:
        if path not in kept:
            shutil.rmtree(path)


def _differences(saved: dict[str, list], wanted: dict[str, list]) -> list[str]:
    found = []
    for name in sorted(set(saved) | set(wanted)):
        if name not in saved:
            found.append(f"{name} is missing in the checkpoint")
        elif name not in wanted:
            found.append(f"{name} is not in this model")
        elif saved[name] != wanted[name]:
            (shape, dtype), (own_shape, own_dtype) = saved[name], wanted[name]
            found.append(
                f"{name} is {dtype}{shape} in the checkpoint, "
                f"{own_dtype}{own_shape} here"
            )
    return found


def _leaves(value: Any, where: str = "") -> dict[str, Any]:
    """The plain values of a config's JSON by their path, `_FREE_FIELDS` left out."""
    if isinstance(value, list):
        value = {f"[{i}]": item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return {where: value}
    leaves = {}
    for name, item in value.items():
        if name not in _FREE_FIELDS:
            dot = "." if where and not name.startswith("[") else ""
            leaves |= _leaves(item, f"{where}{dot}{name}")
    return leaves


def _config_differences(saved: dict[str, Any], config: DecoderConfig) -> list[str]:
    # By way of the class, which fills in fields that are younger than the checkpoint.
    own = _leaves(json.loads(to_json(config)))
    theirs = _leaves(json.loads(to_json(from_json(json.dumps(saved)))))
    missing = "absent"
    return [
        f"{name} is {theirs.get(name, missing)!r} in the checkpoint, "
        f"{own.get(name, missing)!r} here"
        for name in sorted(set(own) | set(theirs))
        if own.get(name, missing) != theirs.get(name, missing)
    ]


def _refuse(checkpoint: pathlib.Path, found: list[str]) -> None:
    if not found:
        return
    shown = found[:_SHOWN_DIFFERENCES]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more")
    lines = "".join(f"\n  {line}" for line in shown)
    if all(line.startswith("opt_state/") for line in found):
        lines += (
            "\n  Only arrays of the optimizer differ: OptimConfig.join_below says "
            "which of them lie in one vector, 0 keeps them apart"
        )
    raise ValueError(f"{checkpoint} is of another run:{lines}")


def _read(checkpoint: pathlib.Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """Reads arrays into the shardings of `wanted`, which fit what was saved."""
    ocp = _orbax()
    read: dict[str, jax.Array] = {}
    for group, arrays in _by_group(wanted).items():
        restore = {
            name: ocp.ArrayRestoreArgs(
                sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
            )
            for name, x in arrays.items()
        }
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            read |= checkpointer.restore(
                (checkpoint / group).absolute(),
                args=ocp.args.PyTreeRestore(item=arrays, restore_args=restore),
            )
    return read


def restore_checkpoint(
    checkpoint: str | os.PathLike[str],
    template: TrainState,
    tokenizer: Any,
    model_config: DecoderConfig,
) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint to go on with the same run.

    Args:
      checkpoint: folder of one checkpoint, see `find_checkpoint`.
      template: abstract state with shardings (`jax.ShapeDtypeStruct` leaves); the mesh
        may be another than that of the run that saved.
      tokenizer: the tokenizer of this run.
      model_config: the decoder's config in this run; `implementation` and
        `remat_policy` may be others than in the run that saved.

    Returns:
      The state, bit for bit, and the state of the data iterator.

    Raises:
      ValueError: the model's config, names, shapes, dtypes or the tokenizer differ; the
        differences are listed. Nothing is cast.
    """
    checkpoint = pathlib.Path(checkpoint)
    metadata = read_metadata(checkpoint)
    wanted = _named_arrays(template)
    found = _config_differences(metadata["model_config"], model_config)
    found += _differences(metadata["arrays"], _describe(wanted))
    if metadata["tokenizer"] != tokenizer.fingerprint:
        found.insert(
            0,
            f"its tokenizer is {metadata['tokenizer'][:16]}, "
            f"this run's is {tokenizer.fingerprint[:16]}",
        )
    _refuse(checkpoint, found)
    read = _read(checkpoint, wanted)
    leaves = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(template)[0]:
        array = read["/".join(path_names(path))]
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(array)
        leaves.append(array)
    state = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return state, metadata["data_state"]


def load_checkpoint_model(
    path: str | os.PathLike[str], *, use_ema: bool = False
) -> tuple[Decoder, Any]:
    """Reads the model and the tokenizer of a checkpoint, for inference.

    Args:
      path: a checkpoint, a folder of checkpoints, or a workdir.
      use_ema: take the running mean of the parameters.

    Returns:
      The decoder on the default device, and the tokenizer.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: the checkpoint does not fit its own config, or has no running mean.
    """
    checkpoint = find_checkpoint(path)
    metadata = read_metadata(checkpoint)
    config = from_json(json.dumps(metadata["model_config"]))
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{checkpoint} holds a config of {type(config).__name__}")
    parts = model_parts(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    wanted = model_template(parts)
    saved = {
        name: spec
        for name, spec in metadata["arrays"].items()
        if _group(name) == "model"
    }
    _refuse(checkpoint, _differences(saved, _describe(wanted)))
    arrays = _read(checkpoint, wanted)
    if use_ema:
        if not any(_group(name) == "ema" for name in metadata["arrays"]):
            raise ValueError(f"{checkpoint} holds no running mean (ema_decay was None)")
        ema = {
            name.replace("params/", "ema/", 1): jax.ShapeDtypeStruct(
                x.shape, jnp.float32, sharding=x.sharding
            )
            for name, x in wanted.items()
            if name.startswith("params/")
        }
        for name, array in _read(checkpoint, ema).items():
            own = name.replace("ema/", "params/", 1)
            arrays[own] = array.astype(wanted[own].dtype)
    params, buffers = (
        {
            name.removeprefix(f"{field}/"): array
            for name, array in arrays.items()
            if name.startswith(f"{field}/")
        }
        for field in _MODEL_FIELDS
    )
    model = parts.merge(params, buffers)
    return model, load_tokenizer(checkpoint / "tokenizer.json")  # pyrefly: ignore


def model_template(parts: ModelParts) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract parameters and buffers by the names that a checkpoint gives them."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    named = {}
    for field in _MODEL_FIELDS:
        for path, variable in nnx.to_flat_state(getattr(parts, field)):
            value = variable.get_value()
            named["/".join((field, *map(str, path)))] = jax.ShapeDtypeStruct(
                value.shape, value.dtype, sharding=sharding
            )
    return named

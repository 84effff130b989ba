"""The mesh, and where each parameter and each batch lies on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxaccel.core.tree import num_stacked_axes, path_names


BATCH_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes.

    Attributes:
      data: copies of the model that see different rows; -1 takes what is left.
      fsdp: parts that parameters and optimizer state are cut into; these devices see
        different rows as well. -1 takes what is left.
      tensor: parts that heads, feed-forward width and vocabulary are cut into.
      replicate_indivisible: hold a whole copy of an array whose dimension an axis
        does not divide, instead of an error.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    replicate_indivisible: bool = False


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh ("data", "fsdp", "tensor"), with automatic axis types.

    Args:
      config: axis sizes.
      devices: taken in order of process, so that a process holds neighbouring rows of
        the batch; all devices of the run by default. One process may use only the
        first of them.

    Returns:
      The mesh.

    Raises:
      ValueError: the sizes do not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    wild = [i for i, size in enumerate(sizes) if size == -1]
    if len(wild) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise ValueError(f"{config} has sizes that are not >= 1, or more than one -1")
    if wild:
        known = int(-np.prod(sizes))
        if len(devices) % known:
            raise ValueError(f"{config} does not divide {len(devices)} devices")
        sizes[wild[0]] = len(devices) // known
    needed = int(np.prod(sizes))
    processes = len({device.process_index for device in devices})
    if needed > len(devices) or (processes > 1 and needed != len(devices)):
        raise ValueError(f"{config} needs {needed} devices, there are {len(devices)}")
    if processes > 1 and (len(devices) // processes) % sizes[2]:
        raise ValueError(
            f"tensor={sizes[2]} must divide the {len(devices) // processes} devices "
            "of a process"
        )
    grid = np.asarray(devices[:needed], dtype=object).reshape(sizes)
    return Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


_IN = ("fsdp", "tensor")
_OUT = ("tensor", "fsdp")

# Path suffix -> mesh axis of each dimension, the [num_periods] axis aside. The longest
# suffix that matches wins; what matches none lies whole on every device.
PARAMETER_AXES: Mapping[str, tuple[str | None, ...]] = {
    "embed/embedding": _OUT,
    "lm_head/kernel": _IN,
    "q_proj/kernel": _IN,
    "gate_proj/kernel": _IN,
    "k_proj/kernel": _IN,
    "v_proj/kernel": _IN,
    "o_proj/kernel": _OUT,
    "q_proj/bias": ("tensor",),
    "k_proj/bias": ("tensor",),
    "v_proj/bias": ("tensor",),
    "sinks": ("tensor",),
    "qkv_proj/kernel": _IN,
    "kv_proj/kernel": _IN,
    "kv_proj/bias": ("tensor",),
    "z_proj/kernel": _IN,
    "a_proj/kernel": _IN,
    "b_proj/kernel": _IN,
    "xbc_proj/kernel": _IN,
    "dt_proj/kernel": _IN,
    "conv_bias": ("tensor",),
    "mixer/D": ("tensor",),
    "conv_kernel": (None, "tensor"),
    "A_log": ("tensor",),
    "dt_bias": ("tensor",),
    "out_proj/kernel": _OUT,
    "up_proj/kernel": _IN,
    "down_proj/kernel": _OUT,
    "latent_in/kernel": _IN,
    "latent_out/kernel": _OUT,
    "router/kernel": ("fsdp", None),
    "w_in": (None, "fsdp", "tensor"),
    "w_out": (None, "tensor", "fsdp"),
    "bias_in/bias": (None, "tensor"),
    "shared_gate/kernel": ("fsdp", None),
    "mtp/proj/kernel": ("fsdp", None),
}


def check_divisible(
    name: str,
    size: int,
    axis: str,
    axis_size: int,
    *,
    advice: str = "choose another mesh or set replicate_indivisible=True",
) -> None:
    """Refuses a size that a mesh axis does not divide.

    Args:
      name: of the size, for the message.
      size: what is to be cut.
      axis: mesh axis.
      axis_size: its parts.
      advice: what to do about it; by default that of a parameter.

    Raises:
      ValueError: names the size, the axis and the axis size.
    """
    if size % axis_size:
        raise ValueError(
            f"{name} is {size}, which mesh axis {axis!r} of size {axis_size} does not "
            f"divide; {advice}"
        )


def check_heads(config: object, tensor: int, name: str = "model") -> None:
    """Refuses head counts that the tensor axis does not divide.

    Args:
      config: a config dataclass; every integer field of it, or of a dataclass or
        tuple inside it, that is called `num_*heads` is checked.
      tensor: size of the tensor axis.
      name: how the error calls `config`.

    Raises:
      ValueError: names the field, the head count and the axis size.
    """
    if isinstance(config, tuple):
        for index, item in enumerate(config):
            check_heads(item, tensor, f"{name}[{index}]")
    if not dataclasses.is_dataclass(config):
        return
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        label = f"{name}.{field.name}"
        is_count = field.name.startswith("num_") and field.name.endswith("heads")
        if is_count and isinstance(value, int):
            check_divisible(label, value, "tensor", tensor)
        else:
            check_heads(value, tensor, label)


def parameter_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, *, replicate_indivisible: bool
) -> PartitionSpec:
    """Where one named array lies.

    Args:
      name: path such as "layers/0/mixer/q_proj/kernel".
      shape: its shape, with the leading [num_periods] axis if it has one.
      mesh: the mesh.
      replicate_indivisible: see `MeshConfig`.

    Returns:
      The mesh axis of each dimension.

    Raises:
      ValueError: an axis does not divide its dimension, or the table's rank is not
        that of the array.
    """
    slash = f"/{name}"
    suffixes = [suffix for suffix in PARAMETER_AXES if slash.endswith(f"/{suffix}")]
    if not suffixes:
        return PartitionSpec()
    axes = (None,) * num_stacked_axes(name) + PARAMETER_AXES[max(suffixes, key=len)]
    if len(axes) != len(shape):
        raise ValueError(f"{name} has shape {shape}, the sharding table says {axes}")
    kept: list[str | None] = []
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        parts = 1 if axis is None else mesh.shape[axis]
        if axis is not None and not replicate_indivisible:
            check_divisible(f"dimension {i} of {name} {shape}", size, axis, parts)
        kept.append(axis if parts > 1 and size % parts == 0 else None)
    return PartitionSpec(*kept)


def parameter_shardings(
    params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    mesh: Mesh,
    *,
    replicate_indivisible: bool = False,
) -> dict[str, NamedSharding]:
    """The sharding of each named array; see `parameter_spec`."""
    return {
        name: NamedSharding(
            mesh,
            parameter_spec(
                name,
                tuple(x.shape),
                mesh,
                replicate_indivisible=replicate_indivisible,
            ),
        )
        for name, x in params.items()
    }


def like_parameters(tree, shardings: Mapping[str, NamedSharding], params, mesh: Mesh):
    """Shardings for a tree that holds copies of the parameters, an optimizer state.

    Args:
      tree: any tree of (abstract) arrays; a leaf under a key that names a parameter
        of the same shape lies as that parameter does, all others on every device.
      shardings: the sharding of each parameter.
      params: the (abstract) parameters by name.
      mesh: the mesh.

    Returns:
      The tree with a sharding in place of each leaf.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def choose(path, leaf):
        for name in reversed(path_names(path)):
            if name in shardings and params[name].shape == leaf.shape:
                return shardings[name]
        return replicated

    return jax.tree_util.tree_map_with_path(choose, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over ("data", "fsdp"), everything else whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def global_batch(batch, mesh: Mesh):
    """Puts this process's rows on its devices, as its part of the global batch.

    Args:
      batch: tree of host arrays [rows of this process, ...].
      mesh: the mesh.

    Returns:
      The tree of global arrays [rows of all processes, ...].

    Raises:
      ValueError: the devices along ("data", "fsdp") do not divide the rows.
    """
    sharding = batch_sharding(mesh)
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    processes = len({device.process_index for device in mesh.devices.flat})
    for leaf in jax.tree.leaves(batch):
        check_divisible(
            "batch rows",
            leaf.shape[0] * processes,
            "data x fsdp",
            parts,
            advice="choose another mesh or another number of rows",
        )
    if processes == 1:
        return jax.device_put(batch, sharding)

    def place(x):
        shape = (x.shape[0] * processes, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, np.asarray(x), shape)

    return jax.tree.map(place, batch)


def constrain_rows(x: jax.Array) -> jax.Array:
    """Asks that activations [B, ...] stay cut by rows, under the ambient mesh.

    Without it the compiler may follow a weight's fsdp axis into the activations.
    Outside `jax.set_mesh` this is the identity.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(axis not in mesh.shape for axis in BATCH_AXES):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))

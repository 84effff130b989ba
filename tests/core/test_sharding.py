"""Mesh sizes, the parameter table and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxaccel.core.sharding import (
    PARAMETER_AXES,
    MeshConfig,
    check_heads,
    constrain_rows,
    global_batch,
    like_parameters,
    make_mesh,
    parameter_shardings,
)
from jaxaccel.models.qwen3_next import Qwen3NextConfig


def specs(shapes, mesh, **options):
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    found = parameter_shardings(params, mesh, **options)
    return {name: sharding.spec for name, sharding in found.items()}


def test_mesh_sizes():
    assert dict(make_mesh(MeshConfig()).shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(MeshConfig(data=-1, tensor=2)).shape) == {
        "data": 4,
        "fsdp": 1,
        "tensor": 2,
    }
    for bad, message in (
        (MeshConfig(data=16), "needs 16 devices, there are 8"),
        (MeshConfig(data=-1, fsdp=3), "does not divide 8"),
        (MeshConfig(data=-1, fsdp=-1), "more than one -1"),
        (MeshConfig(tensor=0), "not >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_mesh(bad)


def test_parameters_lie_as_the_table_says():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert specs(
        {
            "embed/embedding": (32, 16),
            "lm_head/kernel": (16, 32),
            "final_norm/scale": (16,),
            "layers/0/mixer/q_proj/kernel": (3, 16, 8),
            "layers/0/mixer/o_proj/kernel": (3, 8, 16),
            "layers/0/mixer/sinks": (3, 2),
            "layers/0/mlp/w_in": (3, 4, 16, 8),
            "layers/0/mlp/w_out": (3, 4, 8, 16),
            "mtp/block/mixer/q_proj/kernel": (16, 8),
        },
        mesh,
    ) == {
        "embed/embedding": P("tensor", "fsdp"),
        "lm_head/kernel": P("fsdp", "tensor"),
        "final_norm/scale": P(),
        "layers/0/mixer/q_proj/kernel": P(None, "fsdp", "tensor"),
        "layers/0/mixer/o_proj/kernel": P(None, "tensor", "fsdp"),
        "layers/0/mixer/sinks": P(None, "tensor"),
        "layers/0/mlp/w_in": P(None, None, "fsdp", "tensor"),
        "layers/0/mlp/w_out": P(None, None, "tensor", "fsdp"),
        "mtp/block/mixer/q_proj/kernel": P("fsdp", "tensor"),
    }


def test_a_dimension_that_does_not_divide():
    mesh = make_mesh(MeshConfig(tensor=4))
    shapes = {"layers/0/mixer/q_proj/kernel": (3, 16, 6)}
    with pytest.raises(ValueError, match=r"dimension 2 of layers.* is 6.*'tensor' of"):
        specs(shapes, mesh)
    replicated = specs(shapes, mesh, replicate_indivisible=True)
    assert replicated == {"layers/0/mixer/q_proj/kernel": P(None, None, None)}
    with pytest.raises(ValueError, match="the sharding table says"):
        specs({"layers/0/mixer/q_proj/kernel": (3, 4, 16, 8)}, mesh)


def test_head_counts_are_checked_by_name():
    config = Qwen3NextConfig.tiny().decoder()
    check_heads(config, 1)
    with pytest.raises(ValueError, match=r"num_kv_heads is 1.*'tensor' of size 2"):
        check_heads(config, 2)


def test_optimizer_state_lies_like_its_parameter():
    mesh = make_mesh(MeshConfig(fsdp=2))
    params = {"lm_head/kernel": jnp.zeros((4, 6)), "final_norm/scale": jnp.zeros(4)}
    shardings = parameter_shardings(params, mesh)
    tree = {"mu": params, "count": jnp.zeros((), jnp.int32), "v": (params,)}
    found = like_parameters(tree, shardings, params, mesh)
    assert found["mu"]["lm_head/kernel"].spec == P("fsdp", None)
    assert found["v"][0]["lm_head/kernel"].spec == P("fsdp", None)
    assert found["count"].spec == P()


def test_batch_rows_are_cut_over_data_and_fsdp():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    batch = global_batch({"x": np.arange(8).reshape(4, 2)}, mesh)["x"]
    assert batch.addressable_shards[0].data.shape == (1, 2)
    np.testing.assert_array_equal(batch, np.arange(8).reshape(4, 2))
    with pytest.raises(ValueError, match="batch rows is 6"):
        global_batch(np.zeros((6, 2)), mesh)
    x = jnp.ones((4, 2, 3))
    assert constrain_rows(x) is x
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain_rows(x * 2.0))(jnp.ones((4, 2, 3)))
    assert y.sharding.spec[0] == ("data", "fsdp")


def test_every_matrix_of_a_hybrid_model_is_in_the_table():
    from flax import nnx

    from jaxaccel.core.tree import flatten_state, model_parts, num_stacked_axes
    from jaxaccel.models.decoder import Decoder

    config = Qwen3NextConfig.tiny().decoder()
    parts = model_parts(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for name, x in flatten_state(parts.params).items():
        if len(x.shape) - num_stacked_axes(name) >= 2:
            assert any(f"/{name}".endswith(f"/{s}") for s in PARAMETER_AXES), name

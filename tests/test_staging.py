"""What `staging.py` has NumPy do is what JAX's programs do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def moves(x):
    return (
        *(x[0], x[-1, 2], x[1:, ::2], x.T, x[:, None], x.reshape(-1), x.ravel()[3]),
        *(jnp.stack([x, x], axis=1), jnp.concatenate([x, x[:1]]), jnp.tile(x, (2, 1))),
        *(jnp.zeros_like(x), jnp.ones((2, 3), x.dtype), jnp.broadcast_to(x, (2, 3, 4))),
        *(
            jnp.full((2,), 7),
            jnp.arange(5),
            jax.lax.broadcasted_iota("int32", (2, 3), 1),
        ),
        *(jnp.squeeze(x[:1, :, None]), jnp.swapaxes(x[None], 0, 2)),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_values_and_types_are_those_of_a_program(dtype):
    x = jnp.asarray(np.arange(12).reshape(3, 4) % 5, dtype)
    for got, want in zip(moves(x), jax.jit(moves)(x), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.weak_type == want.weak_type
        np.testing.assert_array_equal(got, want)


def test_what_was_moved_has_memory_of_its_own():
    numbers = np.arange(64, dtype=np.float32)
    x = jax.device_put(numbers.copy())
    y = x.reshape(8, 8)
    jax.jit(lambda y: y + 1, donate_argnums=0)(y).block_until_ready()
    assert y.is_deleted()
    np.testing.assert_array_equal(x, numbers)


def test_what_was_put_somewhere_stays_there():
    where = jax.devices()[1]
    x = jax.device_put(np.ones((2, 3), np.float32), where)
    for moved in (x[0], x.T, x.reshape(-1), jnp.concatenate([x, x])):
        assert moved.devices() == {where}
        assert moved.committed

"""Kernels that update arrays in place, where XLA fuses what stands around them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels._common import hw
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_step import gated_delta_step, specs


SPEC = dataclasses.replace(next(specs.specs("model")), batch=2, spare=0, skipped=False)


def scanned(args, pools, implementation):
    """A token through layers that differ in nothing but their pools, scanned."""
    op = functools.partial(gated_delta_step, implementation=implementation)
    run = specs.run(SPEC, op)

    def layer(total, pools):
        y, *pools = run(*args[:4], *pools, *args[6:])
        return total + y.astype(jnp.float32), tuple(pools)

    return jax.lax.scan(layer, jnp.zeros(args[3].shape, jnp.float32), pools)


def three_layers():
    args = SPEC.arguments(jax.random.key(23))
    scales = jnp.arange(1, 4)
    pools = (
        x[None] * scales.reshape(-1, *[1] * x.ndim).astype(x.dtype)
        for x in args[specs.POOLS]
    )
    return args, tuple(pools)


def test_nothing_that_xla_fuses_stands_at_the_kernel_in_a_scan():
    """All that the kernel reads comes out of a barrier, all it gives goes into one."""
    with hw.assume():
        run = functools.partial(scanned, implementation="mosaic")
        jaxpr = jax.make_jaxpr(run)(*jax.eval_shape(three_layers))
    (scan,) = (x for x in jaxpr.eqns if x.primitive.name == "scan")
    (launch,) = (
        x
        for x in scan.params["jaxpr"].eqns
        if "_launch" in str(x.params.get("name", ""))
    )
    equations = launch.params["jaxpr"].eqns
    names = [x.primitive.name for x in equations]
    first, last = (i for i, x in enumerate(names) if x == "optimization_barrier")
    assert names[first + 1 : last] == [
        *("new_ref", "new_ref", "custom_vmap_call", "freeze", "freeze")
    ]
    of_barrier = set(equations[first].outvars)
    refs = {x for made in equations[first + 1 : first + 3] for x in made.outvars}
    assert set(equations[first + 3].invars) <= of_barrier | refs
    assert set(equations[first + 3].outvars) <= set(equations[last].invars)


@pytest.mark.gpu
def test_a_scan_over_layers_has_each_layers_state_on_the_card():
    """XLA fused the kernel with the slices of a scan, and states came from nowhere."""
    args = three_layers()
    got, want = (
        jax.jit(functools.partial(scanned, implementation=x))(*args)
        for x in ("mosaic", "reference")
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, rel=4e-3)

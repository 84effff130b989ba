"""Calls of `attention` and its gradients, and what they are compared with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.attention import (
    attention,
    attention_with_lse,
    specs,
    tile_bounds,
    tiling,
)


NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks")
# Relative errors against the reference in f32; lse is computed in f32.
LIMITS = dict(zip(NAMES, (4e-3, 1e-5, 8e-3, 8e-3, 8e-3, 8e-3), strict=True))


def arguments(time, heads, kv_heads, dim=64, *, length=None, batch=1, dtype="bfloat16"):
    """q, k, v, do, dlse, of numpy."""
    rng = np.random.default_rng(0)
    length = time if length is None else length
    sizes = ((time, heads), (length, kv_heads), (length, kv_heads), (time, heads))
    q, k, v, do = (
        rng.standard_normal((batch, *size, dim)).astype(jnp.dtype(dtype))
        for size in sizes
    )
    return q, k, v, do, rng.standard_normal((batch, time, heads)).astype(np.float32)


def lengths(*documents, time):
    """Segment ids [1, time] of documents of these lengths, then padding."""
    ids = np.repeat(np.arange(1, len(documents) + 1), documents)
    return np.pad(ids, (0, time - len(ids)))[None].astype(np.int32)


def program(implementation, *, share_bounds=False, **options):
    """`results` of the arguments alone, compiled for all that have the same shapes."""

    def run(args, sinks, ids, kv_ids, is_prefix):
        q, k, v, do, d_lse = args
        mask = {
            "q_segment_ids": ids,
            "kv_segment_ids": ids if kv_ids is None else kv_ids,
            "is_prefix": is_prefix,
        }
        bounds = None
        if share_bounds:
            bounds = tile_bounds(
                batch=q.shape[0],
                time=q.shape[1],
                window=options["window"],
                **mask,
                **tiling(q.shape[3]),
            )

        def op(q, k, v, sinks):
            return attention_with_lse(
                *(q, k, v),
                sinks=sinks,
                bounds=bounds,
                implementation=implementation,
                **mask,
                **options,
            )

        (o, lse), pull = jax.vjp(op, q, k, v, sinks)
        seen = jnp.isfinite(lse)
        grads = pull((do.astype(o.dtype), jnp.where(seen, d_lse, 0.0)))
        return o, jnp.where(seen, lse, 0.0), *(x for x in grads if x is not None)

    return jax.jit(run)


def results(
    args,
    implementation,
    *,
    sinks=None,
    ids=None,
    kv_ids=None,
    is_prefix=None,
    **options,
):
    """o, lse and all gradients, those of lse among them; -inf becomes 0."""
    return program(implementation, **options)(args, sinks, ids, kv_ids, is_prefix)


def interpreted_results(args, **options):
    with interpreted():
        return [np.asarray(x) for x in results(args, "mosaic", **options)]


def exact(args):
    return tuple(x.astype(jnp.float32) for x in args)


def in_tiles(x):
    """[B, T, ...] as [B, T / 64, 64, ...]: all rows of a tile have zeros together."""
    x = np.asarray(x).astype(np.float64)
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 64)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, 64, *x.shape[2:])


def assert_all_close(got, want, names=NAMES):
    """In norm; what has queries or keys, also in the worst tile of a head."""
    for name, a, b in zip(names, got, want, strict=False):
        assert a.shape == b.shape
        limits = {"rel": LIMITS[name], "name": name}
        if a.ndim == 1:
            assert_close(a, b, block_rel=np.inf, **limits)
        else:
            assert_close(in_tiles(a), in_tiles(b), block_axes=(0, 1, 3), **limits)


def assert_equal_to_reference(args, got, **options):
    assert_all_close(got, results(exact(args), "reference", **options))


def assert_model_shape(spec, repeats, **options):
    """The kernels' results and gradients are the reference's, and the same each time.

    Args:
      spec: of the op's sizes.
      repeats: how many runs have the bits of the first.
      **options: of `attention`, besides the implementation.
    """
    args = list(spec.arguments(jax.random.key(1)))
    if spec.logit_cap is not None:
        # Logits of 20 to 40, at which the cap counts.
        args[0] = args[0] * jnp.asarray(25, args[0].dtype)
    mosaic = functools.partial(attention, implementation="mosaic", **options)
    reference = functools.partial(attention, implementation="reference")
    run = jax.jit(specs.run(spec, mosaic, backward=True))
    got = run(*args)
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    want = jax.jit(specs.run(spec, reference, backward=True))(*exact)
    assert_all_close(got, want, [name for name in NAMES if name != "lse"])

    @jax.jit
    def same(a, b):
        return jnp.all(
            jnp.asarray([jnp.array_equal(*x) for x in zip(a, b, strict=True)])
        )

    for _ in range(repeats):
        assert same(run(*args), got)

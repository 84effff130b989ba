"""One launch parameter's trial in a tuning run: right first, then timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels._common import timing
from pallas_kernels._common.testing import assert_close_on_device


def milliseconds(
    variant: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    want: Any,
    *,
    whole: bool = False,
) -> float | None:
    """Times one variant of a kernel and says so.

    Args:
      variant: the launch parameters, for the line that is printed.
      fn: the kernel with them, not compiled yet.
      args: what to call it with.
      want: the right results.
      whole: as for `assert_close_on_device`.

    Returns:
      Milliseconds, `None` if it cannot run or a result is wrong.
    """
    try:
        compiled = jax.jit(fn).lower(*args).compile()
        with timing.alone():
            got = jax.tree.leaves(compiled(*args))
            for index, (a, b) in enumerate(
                zip(got, jax.tree.leaves(want), strict=True)
            ):
                # Both are rounded, and sums have another order.
                name = f"result {index}"
                assert_close_on_device(a, b, rel=1e-2, name=name, whole=whole)
            del got  # its memory is wanted by the calls that are timed
            ms = timing.measure(compiled, args, cold=False)[0].ms
    except (AssertionError, RuntimeError, ValueError) as error:
        print(f"  {variant}: {str(error).splitlines()[0]}", flush=True)
        return None
    print(f"  {ms:9.4f} ms  {variant}", flush=True)
    return ms

"""Makes Pallas' interpreter quick enough for a suite on two cores.

Every read, write and barrier of an interpreted kernel is a callback, whose arguments
JAX turns from NumPy arrays into arrays of its own, for the callback to turn them back:
most of the time of such a test. Here they stay what they are.
"""

import numpy as np


try:
    from jax._src import callback
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    _of_jax = shared_memory._to_int
except (ImportError, AttributeError):
    callback = None


class _Api:
    """Stands where `callback` looks for `jax.device_put`."""

    @staticmethod
    def device_put(args, device):
        del device
        return args


def _to_int(x):
    return x.item() if isinstance(x, (np.ndarray, np.generic)) else _of_jax(x)


def hand_over_numpy() -> None:
    """Leaves arguments of callbacks as they come, for the rest of the process.

    It replaces what another release may call otherwise; there, tests are slower.
    """
    if callback is None:
        return
    callback.api = _Api
    shared_memory._to_int = _to_int

"""Makes Pallas' interpreter quick enough for a suite on two cores.

Every read, write and barrier of an interpreted kernel is a callback, whose arguments
JAX turns from NumPy arrays into arrays of its own, for the callback to turn them back:
most of the time of such a test. Here they stay what they are.
"""

import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


class _Api:
    """Stands where `callback` looks for `jax.device_put`."""

    @staticmethod
    def device_put(args, device):
        del device
        return args


def _to_int(x, of_jax=shared_memory._to_int):
    return x.item() if isinstance(x, (np.ndarray, np.generic)) else of_jax(x)


def hand_over_numpy() -> None:
    """Leaves arguments of callbacks as they come, for the rest of the process."""
    callback.api = _Api
    shared_memory._to_int = _to_int

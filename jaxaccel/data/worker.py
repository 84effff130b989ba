"""What a data worker process does besides building batches.

No jax here: worker processes import this module.
"""

from __future__ import annotations

import multiprocessing
import os
import threading


def exit_with_parent(worker_index: int, worker_count: int) -> None:
    """Ends this process as soon as the process that started it is gone.

    A parent that is killed (out of memory, a scheduler's SIGKILL) cannot tell its
    workers to stop, and they would wait for minutes on queues that no one reads.

    Args:
      worker_index: which worker this is; grain passes it.
      worker_count: of how many.
    """
    del worker_index, worker_count
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        # Not `sys.exit`: it would wait for threads that are stuck on those queues.
        os._exit(1)

    threading.Thread(target=wait, name="exit_with_parent", daemon=True).start()

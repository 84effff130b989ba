"""Device times of PyTorch peers, without the host's part of their launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from pallas_kernels._common.timing import FLUSH_BYTES, Timing


# Calls between two events: a short kernel ends before the next one is launched.
REPEATS = 10


def measure(call: Callable[[], Any], runs: int = 20) -> list[Timing]:
    """Times replays of CUDA graphs, or calls if they cannot be captured.

    Args:
      call: launches the kernels, on tensors that stay where they are.
      runs: how many times; the median counts.

    Returns:
      Warm, a call of `REPEATS` in a row, and cold, one call after L2 was overwritten,
      by the timer "cuda graph" or "cuda events".
    """
    import torch  # pyrefly: ignore[missing-import]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what is tuned or compiled on first use
        for _ in range(3):
            call()
    torch.cuda.synchronize()

    def many() -> None:
        for _ in range(REPEATS):
            call()

    warm, cold, timer = many, call, "cuda events"
    try:
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for graph, captured in zip(graphs, (many, call), strict=True):
            with torch.cuda.graph(graph):
                captured()
        warm, cold, timer = graphs[0].replay, graphs[1].replay, "cuda graph"
    except RuntimeError:
        torch.cuda.synchronize()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def once(before: Callable[[], Any], what: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()  # while it runs, the host launches what is timed
        start.record()
        what()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    return [
        Timing(
            ms=statistics.median(once(before, what) for _ in range(runs)) / calls,
            timer=timer,
            cache=cache,
        )
        for cache, before, what, calls in (
            ("warm", warm, warm, REPEATS),
            ("cold", flush.zero_, cold, 1),
        )
    ]

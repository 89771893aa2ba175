"""Times one launch under the conditions of a step: from a CUDA graph, with cold caches."""

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from kernels.graph_capture import abandon_capture, begin_capture

# Several times the size of any L2 cache. While this much is written, the host can queue the launch.
_FLUSH_BYTES: Final = 1 << 29
_WARM_UP: Final = 3


def seconds_of(launch: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median of `repeats` runs of `launch`, in seconds.

    On a GPU the launch is replayed from a CUDA graph, so that the host's time does not count.
    Before each run, half a GiB is written, so that the inputs are read from memory, not from the
    L2 cache. If `launch` cannot be captured, it is called directly. The host then queues the launch
    during the write, so the host's time counts only if it is longer than the write. On a CPU the
    result is the wall time, without a warm-up.
    """
    if device.type != "cuda":
        return statistics.median(_wall_s(launch) for _ in range(repeats))
    run = _replay_of(launch, device)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        flush.zero_()
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return 1e-3 * float(statistics.median(start.elapsed_time(end) for start, end in pairs))


def _replay_of(launch: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays `launch` from a CUDA graph, or `launch` if capture fails."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        try:
            begin_capture(graph, pool)
            launch()
            graph.capture_end()
        except BaseException as error:
            abandon_capture(graph, pool, stream.device_index)
            if not isinstance(error, RuntimeError):
                raise
            torch.cuda.synchronize()
            return launch
    graph.replay()
    return graph.replay


def _wall_s(launch: Callable[[], object]) -> float:
    started = time.perf_counter()
    launch()
    return time.perf_counter() - started

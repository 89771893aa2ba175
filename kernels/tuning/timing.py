"""Times one launch as in a step: from a CUDA graph, with cold caches."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

# Several times the size of any L2 cache; meanwhile the host has time to enqueue the launch.
_FLUSH_BYTES: Final = 1 << 29
_WARM_UP: Final = 3


def seconds_of(launch: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median of `repeats` runs of `launch`, in seconds.

    On a GPU the launch is replayed from a CUDA graph, so that the host's time does not count.
    Before each run half a GiB is written, so that the inputs come from memory. A launch that cannot
    be captured is run directly; then the host's time counts if it exceeds the time of the write. On
    a CPU the result is the wall time, without a warm-up.
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
    """Return a warm CUDA graph of `launch`, or `launch` itself if it cannot be captured."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        try:
            with _capturing(graph, pool, stream.device_index):
                launch()
        except RuntimeError:
            torch.cuda.synchronize()
            return launch
    graph.replay()
    return graph.replay


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, device_index: int) -> Iterator[None]:
    """Capture the work of the block; if that fails, restore torch's state.

    `torch.cuda.graph` does not: if the capture cannot be ended, its stream stays current, and up to
    torch 2.13 the allocator behaves as if the capture were still running. A worker's captures do
    the same (`gpu_worker/step/graphs/cuda_graphs.py`).
    """
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # there is nothing to end, or it has failed
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # the allocator has ended it already
            torch._C._cuda_endAllocateToPool(device_index, pool)  # noqa: SLF001
        raise


def _wall_s(launch: Callable[[], object]) -> float:
    started = time.perf_counter()
    launch()
    return time.perf_counter() - started

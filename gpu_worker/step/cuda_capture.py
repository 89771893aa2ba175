"""Captures CUDA graphs, all in one pool of memory."""

from collections.abc import Callable

import torch


class CudaGraphs:
    """A `GraphBackend` of one device; its graphs run one at a time, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, compute: Callable[[], None]) -> Callable[[], object]:
        """See `GraphBackend`; `compute` is run once before, on the stream that captures.

        Kernels are compiled and libraries set up by that, which a capture would not survive.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: that is theirs.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()
        return graph.replay

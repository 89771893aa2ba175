"""Captures a computation as CUDA graphs, whole or in pieces with eager work between them."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch

from gpu_worker.models.attention import AttentionMetadata
from gpu_worker.ranks.collectives import Ranks
from kernels.graph_capture import abandon_capture, begin_capture

Between: TypeAlias = Callable[[Callable[[], object]], object]
"""Ends the graph that is being captured, inserts its argument as eager work, and begins the next
graph."""


class Forward(Protocol):
    """The type of `Decoder.forward`, the part of a model that is captured in graphs."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: Any,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the hidden states of all tokens.

        `metadata.wanted`, which would select some of the tokens, is None in graphs.
        """


def do_nothing() -> None:
    """The default of a callback."""


class PiecesError(Exception):
    """A model's forward pass cannot be captured in pieces."""


class LostRankError(Exception):
    """A rank failed while other ranks wait for it.

    The process of the failed rank must end; its end makes the processes of the other ranks end,
    too.
    """


class GraphBackend(Protocol):
    """Captures graphs."""

    def capture(self, compute: Callable[[Between], None]) -> Callable[[], object]:
        """Capture the device work of `compute`; the returned function replays it.

        `compute` gets a function. Work that `compute` passes to this function is not captured; a
        replay calls the work between two graphs. `compute` may be called more than once. If this
        method raises any exception, the computation cannot be captured.
        """

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of `tensor` that does not keep the memory of `tensor` allocated.

        Work between graphs must keep only such views. If the work kept a tensor that was allocated
        during the capture, later tensors of the graphs could not use that tensor's memory.
        """


class CudaGraphs:
    """The `GraphBackend` of one GPU: graphs share one memory pool and run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, compute: Callable[[Between], None]) -> Callable[[], object]:
        """See `GraphBackend`. `compute` runs once before the capture, on the capturing stream.

        In the run before the capture, kernels are compiled and libraries are set up. If either
        happened during the capture, the capture would fail.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute(lambda work: work())
            torch.cuda.synchronize()
            gc.collect()  # freeing memory during a capture could break it
            torch.cuda.empty_cache()
            capture = _Capture(self._pool, self._stream.device_index)
            with capture.running():
                compute(capture.between)
        return capture.replay

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `GraphBackend`."""
        storage = torch._C._construct_storage_from_data_pointer(  # noqa: SLF001
            tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
        )
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *place)


class GraphsOfAll:
    """The `GraphBackend` of one of several ranks: a capture that fails in one rank fails in all.

    Ranks communicate within a step, so either all of them replay a graph, with the same padding, or
    none does. All ranks decide alike, because they have the same StepBatch and the same graphs.
    Ranks also communicate when `compute` runs before a capture (`CudaGraphs.capture`). This class
    has not run on hardware yet.
    """

    def __init__(self, backend: GraphBackend, ranks: Ranks) -> None:
        self._backend = backend
        self._ranks = ranks
        self.alias = backend.alias

    def capture(self, compute: Callable[[Between], None]) -> Callable[[], object]:
        """See `GraphBackend`; all ranks call this with the same computation.

        Raises:
            LostRankError: The run of `compute` before the capture failed, perhaps only in this
                rank.
        """
        has_run = False

        def watched(between: Between) -> None:
            nonlocal has_run
            try:
                compute(between)
            except PiecesError:  # depends only on the model, so all ranks raise it
                raise
            except Exception as raised:
                if has_run:  # the others do not wait during a capture
                    raise
                raise LostRankError("the run before a capture failed") from raised
            has_run = True

        error: Exception | None = None
        replay: Callable[[], object] | None = None
        try:
            replay = self._backend.capture(watched)
        except LostRankError:
            raise
        except Exception as raised:  # noqa: BLE001 - the other ranks must know, whatever it is
            error = raised
        (is_captured,) = self._ranks.least(float(error is None))
        if error is not None:
            raise error
        if replay is None or not is_captured:
            raise RuntimeError("another rank could not capture the graph")
        return replay


class _Capture:
    """One capture: its graphs and the work between them, which `replay` runs in order."""

    def __init__(self, pool: Any, device_index: int) -> None:
        self._pool = pool
        self._device_index = device_index
        self._parts: list[Callable[[], object]] = []
        self._graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        for part in self._parts:
            part()

    def between(self, work: Callable[[], object]) -> None:
        """See `Between`. The work is not called, because a capture computes nothing."""
        self._end()
        self._parts.append(work)
        self._begin()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Capture the body of the `with` statement; if that fails, restore torch's state."""
        try:
            self._begin()
            yield
            self._end()
        except BaseException:
            abandon_capture(self._graph, self._pool, self._device_index)
            raise

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        begin_capture(self._graph, self._pool)

    def _end(self) -> None:
        self._graph.capture_end()
        self._parts.append(self._graph.replay)

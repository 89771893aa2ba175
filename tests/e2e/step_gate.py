"""A proxy between scheduler and worker that holds back steps' results until a test releases
them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from quire.v1 import worker_pb2, worker_pb2_grpc


class StepGate(worker_pb2_grpc.WorkerServiceServicer):
    """Forwards everything; while closed, it forwards a result only if the test permits one more."""

    def __init__(self, uds: Path, worker_uds: Path) -> None:
        self.uds = uds
        self._channel = grpc.insecure_channel(f"unix:{worker_uds}")
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._changed = threading.Condition()
        self._is_open = True
        self._num_permits = 0
        self._num_held = 0
        self._num_passed = 0
        self._server = grpc.server(ThreadPoolExecutor(8))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{uds}")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.open()
        self._channel.close()
        self._server.stop(None).wait()

    def open(self) -> None:
        """Forwards everything from now on."""
        with self._changed:
            self._is_open = True
            self._num_permits = 0
            self._changed.notify_all()

    def close(self, within_s: float = 60.0) -> None:
        """Holds back all results; returns when it holds one, so that none passes any more."""
        with self._changed:
            self._is_open = False
            assert self._changed.wait_for(lambda: self._num_held, within_s), "no step came"

    def let_through(self, num_steps: int) -> None:
        """Permits `num_steps` results, held back now or later."""
        with self._changed:
            self._num_permits += num_steps
            self._changed.notify_all()

    @property
    def num_permits(self) -> int:
        """Results that the test permits and the worker has not sent yet."""
        with self._changed:
            return self._num_permits

    @property
    def num_passed(self) -> int:
        """Results sent to the newest scheduler."""
        with self._changed:
            return self._num_passed

    def Attach(self, request: worker_pb2.AttachRequest, context: Any) -> Any:  # noqa: N802
        try:
            return self._worker.Attach(request, timeout=10)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def ReadHoldings(  # noqa: N802
        self, request: worker_pb2.ReadHoldingsRequest, context: Any
    ) -> Iterator[worker_pb2.ReadHoldingsResponse]:
        del context
        yield from self._worker.ReadHoldings(request, timeout=10)

    def DescribeDevice(  # noqa: N802
        self, request: worker_pb2.DescribeDeviceRequest, context: Any
    ) -> Any:
        try:
            return self._worker.DescribeDevice(request, timeout=10)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def Execute(  # noqa: N802
        self, batches: Iterator[worker_pb2.StepBatch], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepResult]:
        with self._changed:
            self._num_passed = 0
        call = self._worker.Execute(batches)
        context.add_callback(call.cancel)
        try:
            for result in call:
                self._hold()
                yield result
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def _hold(self) -> None:
        with self._changed:
            self._num_held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_open or self._num_permits)
            self._num_held -= 1
            self._num_permits -= not self._is_open
            self._num_passed += 1

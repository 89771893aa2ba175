"""The worker's `AdapterService`: LoRA adapters that its scheduler has it load and unload."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc.aio
import structlog

from contract.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
)
from gpu_worker.lora.adapter_id import MAX_ADAPTER_NAME, AdapterId, is_adapter_name
from gpu_worker.service.api import WorkerService
from gpu_worker.service.description_wire import adapters_to_proto
from quire.v1 import adapters_pb2, adapters_pb2_grpc
from rpc.grpc_server import Service, service_of

if TYPE_CHECKING:
    from gpu_worker.lora.adapter import Adapter  # which imports torch

AdapterLoader: TypeAlias = "Callable[[str, Path], Adapter]"
"""Loads an adapter by its name and from its directory, on whatever thread; raises QuireError."""

_log = structlog.get_logger()


class AdapterSteps(Protocol):
    """What runs the steps: `step_loop.StepLoop`, as far as it has to do with adapters."""

    def add_adapter(self, number: int, adapter: "Adapter") -> Awaitable[None]:
        """Let the steps that are submitted after this call name an adapter by its number."""

    def remove_adapter(self, number: int) -> Awaitable[None]:
        """Let go of an adapter, as soon as no row has it."""


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """Changes the adapters of a worker, one after another; the steps go on meanwhile."""

    def __init__(self, worker: WorkerService) -> None:
        self._worker = worker
        self._load: AdapterLoader | None = None
        self._steps: AdapterSteps | None = None
        self._num_numbered = 0
        self._lock = asyncio.Lock()

    def open(self, load: AdapterLoader, steps: AdapterSteps) -> None:
        """The model is there, and `worker` is open."""
        self._load, self._steps = load, steps
        self._num_numbered = len(self._worker.adapters)

    async def close(self) -> None:
        """The model is about to go: when what is being loaded is, let go of it, until `open`."""
        async with self._lock:
            self._load = self._steps = None

    def service(self) -> Service:
        """What `rpc.server.serve` takes."""
        return service_of(adapters_pb2, adapters_pb2_grpc, "AdapterService", self)

    async def LoadAdapter(  # noqa: N802 - the proto's name
        self,
        request: adapters_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapters_pb2.LoadAdapterResponse:
        """Read an adapter beside the steps, then let steps name it."""
        del context
        self._worker.check_epoch(request.epoch)
        _check_name(request.name, self._worker.model_id)
        directory = absolute_directory(request.directory)
        async with self._lock:
            load, steps = self._opened()
            adapter = await asyncio.to_thread(load, request.name, directory)
            self._worker.check_epoch(request.epoch)  # it may have taken long
            before = self._find(request.name)
            was_there = before == adapter.id
            if before is not None and not was_there:
                raise AlreadyExistsError(
                    f"LoRA adapter {request.name!r} is loaded with other contents"
                    f" ({before.digest.hex()[:8]}; those of {directory} are"
                    f" {adapter.id.digest.hex()[:8]}): unload it first"
                )
            if not was_there:
                self._num_numbered += 1
                number = self._num_numbered
                added = steps.add_adapter(number, adapter)
                # Before anything is waited for: whoever attaches is told of it.
                self._worker.adapters = {**self._worker.adapters, adapter.id: number}
                await added
                _log.info("adapter loaded", name=request.name, directory=str(directory))
        (told,) = adapters_to_proto([before if before is not None else adapter.id])
        return adapters_pb2.LoadAdapterResponse(adapter=told, was_there=was_there)

    async def UnloadAdapter(  # noqa: N802 - the proto's name
        self,
        request: adapters_pb2.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapters_pb2.UnloadAdapterResponse:
        """Let no step name an adapter any more; rows that have it keep it."""
        del context
        self._worker.check_epoch(request.epoch)
        async with self._lock:
            _, steps = self._opened()
            adapter = self._find(request.name)
            if adapter is None or request.digest not in (b"", adapter.digest):
                which = f" ({request.digest.hex()[:8]})" if request.digest else ""
                raise NotFoundError(f"LoRA adapter {request.name!r}{which} is not loaded")
            adapters = dict(self._worker.adapters)
            removed = steps.remove_adapter(adapters.pop(adapter))
            self._worker.adapters = adapters
            await removed
            _log.info("adapter unloaded", name=request.name)
        return adapters_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802 - the proto's name
        self,
        request: adapters_pb2.ListAdaptersRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapters_pb2.ListAdaptersResponse:
        """Say which there are."""
        del request, context
        told = adapters_to_proto(self._worker.adapters)
        return adapters_pb2.ListAdaptersResponse(
            adapters=[adapters_pb2.LoadedAdapter(adapter=each) for each in told]
        )

    def _find(self, name: str) -> AdapterId | None:
        return next((each for each in self._worker.adapters if each.name == name), None)

    def _opened(self) -> tuple[AdapterLoader, AdapterSteps]:
        assert self._load is not None, "the worker is open"
        assert self._steps is not None, "the worker is open"
        return self._load, self._steps


def refuse_adapters(obstacle: str) -> AdapterLoader:
    """Give what stands for loading where there can be none."""

    def load(name: str, directory: Path) -> "Adapter":  # noqa: ARG001
        raise UnimplementedError(f"LoRA adapter {name!r}: the worker was started with {obstacle}")

    return load


def _check_name(name: str, model_id: str) -> None:
    if not is_adapter_name(name):
        raise InvalidArgumentError(
            "name",
            f"is {name[:MAX_ADAPTER_NAME]!r}; it must be 1 to {MAX_ADAPTER_NAME} printable"
            " characters",
        )
    if name == model_id:
        raise InvalidArgumentError("name", f"is {name!r}, which is what requests call the model")


def absolute_directory(text: str) -> Path:
    """Parse the field `directory` of a request; raises InvalidArgumentError."""
    directory = Path(text)
    if not directory.is_absolute():
        raise InvalidArgumentError("directory", f"is {text!r}; it must be an absolute path")
    return directory

"""Operators' calls: load and unload LoRA adapters, unload and load the model."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc.aio
import structlog

from contract.codec.info import adapters_to_proto
from contract.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
)
from contract.lora import MAX_ADAPTER_NAME_CHARS, LoraAdapter, is_adapter_name
from gpu_worker.service.api import WorkerService
from quire.v1 import adapters_pb2, adapters_pb2_grpc
from rpc.grpc_server import Service, service_of

if TYPE_CHECKING:
    from gpu_worker.lora.adapter import Adapter  # which imports torch
from gpu_worker.loading.model_slot import ModelSlot
from quire.v1 import loading_pb2, loading_pb2_grpc

AdapterLoader: TypeAlias = "Callable[[str, Path], Adapter]"
"""Loads an adapter, given its name and directory, on any thread; raises QuireError."""

_log = structlog.get_logger()


class AdapterSteps(Protocol):
    """The part of `loop.StepLoop` that adapters need."""

    def add_adapter(self, number: int, adapter: "Adapter") -> Awaitable[None]:
        """Make the adapter available to steps submitted after this call, by its number."""

    def remove_adapter(self, number: int) -> Awaitable[None]:
        """Free an adapter as soon as no row uses it."""


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """The worker's `AdapterService`: changes adapters one after another, while steps continue."""

    def __init__(self, worker: WorkerService) -> None:
        self._worker = worker
        self._load: AdapterLoader | None = None
        self._steps: AdapterSteps | None = None
        self._num_numbered = 0
        self._lock = asyncio.Lock()

    def open(self, load: AdapterLoader, steps: AdapterSteps) -> None:
        """Start serving. The model must be loaded, and `worker` open."""
        self._load, self._steps = load, steps
        self._num_numbered = len(self._worker.adapters)

    async def close(self) -> None:
        """Stop serving before the model is unloaded; waits for an adapter that is loading."""
        async with self._lock:
            self._load = self._steps = None

    def service(self) -> Service:
        return service_of(adapters_pb2, adapters_pb2_grpc, "AdapterService", self)

    async def LoadAdapter(  # noqa: N802 - the proto's name
        self,
        request: adapters_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> adapters_pb2.LoadAdapterResponse:
        """Read an adapter while steps continue, then make it available to steps."""
        del context
        self._worker.check_epoch(request.epoch)
        _check_name(request.name, self._worker.model_id)
        directory = absolute_directory(request.directory)
        async with self._lock:
            load, steps = self._opened()
            adapter = await asyncio.to_thread(load, request.name, directory)
            self._worker.check_epoch(request.epoch)  # again, because loading may have taken long
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
                # There is no await before this, so a scheduler that attaches now sees the adapter.
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
        """Stop offering an adapter to new rows; rows that use it keep it."""
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
        del request, context
        told = adapters_to_proto(self._worker.adapters)
        return adapters_pb2.ListAdaptersResponse(
            adapters=[adapters_pb2.LoadedAdapter(adapter=each) for each in told]
        )

    def _find(self, name: str) -> LoraAdapter | None:
        return next((each for each in self._worker.adapters if each.name == name), None)

    def _opened(self) -> tuple[AdapterLoader, AdapterSteps]:
        assert self._load is not None, "the worker is open"
        assert self._steps is not None, "the worker is open"
        return self._load, self._steps


def _check_name(name: str, model_id: str) -> None:
    if not is_adapter_name(name):
        raise InvalidArgumentError(
            "name",
            f"is {name[:MAX_ADAPTER_NAME_CHARS]!r}; it must be 1 to {MAX_ADAPTER_NAME_CHARS}"
            " printable characters",
        )
    if name == model_id:
        raise InvalidArgumentError("name", f"is {name!r}, which is the model's name in requests")


def absolute_directory(text: str) -> Path:
    """Parse the field `directory` of a request; raises InvalidArgumentError."""
    directory = Path(text)
    if not directory.is_absolute():
        raise InvalidArgumentError("directory", f"is {text!r}; it must be an absolute path")
    return directory


_POLL_S = 0.1
"""How often load progress is polled."""


class LoadingServicer(loading_pb2_grpc.LoadingServiceServicer):
    """The worker's `LoadingService`: unloads the model to free the device, and loads a model."""

    def __init__(self, worker: WorkerService, slot: ModelSlot) -> None:
        self._worker = worker
        self._slot = slot

    def service(self) -> Service:
        return service_of(loading_pb2, loading_pb2_grpc, "LoadingService", self)

    async def Unload(  # noqa: N802 - the proto's name
        self, request: loading_pb2.UnloadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> loading_pb2.UnloadResponse:
        """Unload the model."""
        del context
        name = self._worker.check_claim(request.epoch)
        _check_itself(request.worker)
        was_loaded = await self._slot.unload()
        unloaded = loading_pb2.UnloadedWorker(worker=name, was_unloaded=not was_loaded)
        return loading_pb2.UnloadResponse(workers=[unloaded])

    async def Load(  # noqa: N802 - the proto's name
        self, request: loading_pb2.LoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Load a model, and stream the progress."""
        name = self._worker.check_claim(request.epoch)
        _check_itself(request.worker)
        directory = absolute_directory(request.directory) if request.directory else None
        load = self._slot.begin_load(directory)
        if load is None:
            await context.write(
                loading_pb2.LoadResponse(worker=name, status="ready", is_done=True, was_loaded=True)
            )
            return
        reported: loading_pb2.LoadResponse | None = None
        is_loaded = False
        while not is_loaded:
            report = loading_pb2.LoadResponse(
                worker=name, status=load.status, progress=load.progress
            )
            if report != reported:
                await context.write(report)
                reported = report
            is_loaded = await load.wait(_POLL_S)
        await context.write(loading_pb2.LoadResponse(worker=name, status="ready", is_done=True))


def _check_itself(worker: str) -> None:
    if worker:
        raise InvalidArgumentError(
            "worker", f"is {worker!r}; a worker has one model, so it must be empty"
        )

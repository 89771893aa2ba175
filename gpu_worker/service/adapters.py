"""The calls that load and unload LoRA adapters."""

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

AdapterLoader: TypeAlias = "Callable[[str, Path], Adapter]"
"""Loads an adapter, given its name and directory. The loader may be called on any thread, and may
raise QuireError."""

_log = structlog.get_logger()


class AdapterSteps(Protocol):
    """The part of `step_loop.StepLoop` that adapters need."""

    def add_adapter(self, number: int, adapter: "Adapter") -> Awaitable[None]:
        """Let steps that are submitted after this call name the adapter, by `number`."""

    def remove_adapter(self, number: int) -> Awaitable[None]:
        """Free an adapter as soon as no row uses it."""


class AdapterServicer(adapters_pb2_grpc.AdapterServiceServicer):
    """The worker's `AdapterService`: loads and unloads adapters one by one, while steps run."""

    def __init__(self, worker: WorkerService) -> None:
        self._worker = worker
        self._load: AdapterLoader | None = None
        self._steps: AdapterSteps | None = None
        self._num_numbered = 0
        self._lock = asyncio.Lock()

    def open(self, load: AdapterLoader, steps: AdapterSteps) -> None:
        """Start serving. The `WorkerService` must be open."""
        self._load, self._steps = load, steps
        self._num_numbered = len(self._worker.adapters)

    async def close(self) -> None:
        """Wait for an adapter that is loading, then stop serving.

        The model is unloaded after this call.
        """
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
                # No await precedes this line, so a scheduler that attaches now sees the adapter.
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

"""Links services within one process: stands in for gRPC's servers and channels.

Both ends are the real ones: generated stubs and servicers. A message is handed over as an object:
it is not encoded, and does not leave the event loop. A handler's QuireError reaches its caller as a
status, as over gRPC. There are no metadata and no deadlines.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Self
from unittest.mock import patch

import grpc.aio

from rpc.grpc_server import Service
from rpc.server import Addresses
from rpc.settings import ProcessSettings
from rpc.status import error_to_status

_END: Any = grpc.aio.EOF  # type: ignore[attr-defined] # the stubs lack it
_ADDRESSES = Addresses(grpc="in-process", http="in-process")


class Links:
    """All methods that are served in this process."""

    def __init__(self) -> None:
        self._methods: dict[str, Any] = {}
        """gRPC's handler of each "/service/method"."""

    async def serve(
        self,
        settings: ProcessSettings,  # noqa: ARG002 - it listens nowhere
        *,
        services: Sequence[Service],
        stop: asyncio.Event,
        on_started: Callable[[Addresses], Awaitable[None]] | None = None,
        **_: object,
    ) -> None:
        """Stand in for `rpc.server.serve`: serve `services` on no port, until `stop`."""
        for service in services:
            service.add(self)  # type: ignore[arg-type] # it calls the two methods that follow
        if on_started is not None:
            await on_started(_ADDRESSES)
        await stop.wait()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: `add_registered_method_handlers` gets the same methods."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        self._methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Make every channel that `rpc.peers.channel.open_channel` opens call these methods."""
        with patch("grpc.aio.insecure_channel", lambda *_, **__: _Channel(self._methods)):
            yield


class _Channel:
    """The part of a gRPC channel that generated stubs and the channel's owners use."""

    def __init__(self, methods: Mapping[str, Any]) -> None:
        self._methods = methods

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def close(self, grace: float | None) -> None:
        pass

    def unary_unary(self, method: str, **_: object) -> Callable[..., Awaitable[Any]]:
        async def call(request: object, **_: object) -> Any:
            try:
                return await self._methods[method].unary_unary(request, None)
            except Exception as error:
                raise _refusal(error) from error

        return call

    def unary_stream(self, method: str, **_: object) -> Callable[..., "_Call"]:
        return lambda request, **_: _Call(self._methods[method].unary_stream, request)

    def stream_stream(self, method: str, **_: object) -> Callable[..., "_Call"]:
        return lambda requests=None: _Call(self._methods[method].stream_stream, requests)


class _Call:
    """The caller's side of a streaming call. The handler runs in a separate task."""

    def __init__(self, handle: Callable[..., Awaitable[None]], request: object | None) -> None:
        """`request` is one message or an iterator of messages; None: the caller writes messages."""
        self._written: asyncio.Queue[object] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._refusal: grpc.aio.AioRpcError | None = None
        given = self._requests() if request is None else request
        self._task = asyncio.create_task(self._run(handle, given))

    async def write(self, request: object) -> None:
        self._written.put_nowait(request)

    async def read(self) -> Any:
        answer = await self._answers.get()
        if answer is _END:
            self._answers.put_nowait(_END)  # for later reads
            if self._refusal is not None:
                raise self._refusal
        return answer

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (answer := await self.read()) is not _END:
            yield answer

    def cancel(self) -> None:
        self._task.cancel()

    async def _requests(self) -> AsyncIterator[object]:
        while True:
            yield await self._written.get()

    async def _run(self, handle: Callable[..., Awaitable[None]], request: object) -> None:
        try:
            await handle(request, _Context(self._answers))
        except Exception as error:  # noqa: BLE001 - raised to the caller
            self._refusal = _refusal(error)
        finally:
            self._answers.put_nowait(_END)


class _Context:
    """The part of a gRPC context that handlers use to write."""

    def __init__(self, answers: asyncio.Queue[Any]) -> None:
        self._answers = answers

    async def write(self, answer: object) -> None:
        self._answers.put_nowait(answer)


def _refusal(error: Exception) -> grpc.aio.AioRpcError:
    code, message, _ = error_to_status(error)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), message)

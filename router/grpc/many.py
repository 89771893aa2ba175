"""`GenerateMany`: many requests on one call, whose events are sent together."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from opentelemetry import context as otel_context

from contract.codec.outputs import (
    finished_to_proto,
    prompt_scores_to_proto,
    usage_to_proto,
    write_delta,
)
from contract.codec.request import generate_request_from_proto, resume_request_from_proto
from contract.errors import InvalidArgumentError, QuireError, TooBusyError
from contract.outputs import Event, OutputDelta, OutputFinished, Usage
from contract.value_checks import check_range
from quire.v1 import inference_pb2
from router.grpc.bounds import RefusedRequest
from router.grpc.call import CallContext, deadline_of
from router.live.live_request import LiveRequest
from router.request.cells import Cells
from rpc.observe import telemetry
from rpc.status import error_to_status

_MOST_UNSENT_BYTES: Final = 256 * 1024
"""Once the next message to the client has this size, requests put no more events into the message.

This is about the size of a step's events for 4,096 streams, and far below the largest message that
clients accept, 4 MiB.
"""
_MOST_UNSENT_ERRORS: Final = 1024
_CANCELLED_AT_ONCE: Final = 64
"""How many requests to cancel in one turn of the event loop; each takes about 0.1 ms to end."""
_MAX_TIMEOUT_S: Final = 1e9
_MAX_NUMBER: Final = 2**64 - 1
_EVENT_BYTES: Final = 32
"""The approximate size of an event, not counting its text, tokens and log-probabilities."""
_LOGPROB_BYTES: Final = 200

_CANCELLED: Final = 1
"""CANCELLED as a `google.rpc.Code`."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request whose number is in use."""

    number: int
    task: asyncio.Task[None] | None = None
    is_named: bool = False
    """Whether the request's id has been sent to the client."""
    has_left: bool = False
    """Whether the client has sent `leave`."""


class ManyCall:
    """One `GenerateMany` call: its requests, and the message that collects their next events.

    While a message waits for a slow client, events collect in the next message. Once the next
    message is full, each request merges its own events. As a `ClientRoom`, a `ManyCall` tells its
    requests whether the next message has room.
    """

    def __init__(self, cells: Cells, context: CallContext) -> None:
        self._cells = cells
        self._context = context
        self._deadline = deadline_of(context)
        self._number_to_request: dict[int, _Request] = {}
        self._response = inference_pb2.GenerateManyResponse()
        self._num_bytes = 0
        """The approximate size of `_response`."""
        self._num_errors = 0
        """The number of errors in `_response`."""
        self._has_events = asyncio.Event()
        self._is_taken = asyncio.Event()
        """Set when the writer takes `_response` and starts a new one."""
        self._num_running = 0
        """The number of requests whose task has not ended."""
        self._has_ended = asyncio.Event()
        self._is_over = False

    async def serve(
        self, messages: AsyncIterator[inference_pb2.GenerateManyRequest | RefusedRequest]
    ) -> None:
        """Serve until the client has sent all requests and all have ended."""
        try:
            async with asyncio.TaskGroup() as writers:
                writers.create_task(self._write())
                async with asyncio.TaskGroup() as tasks:
                    try:
                        async for message in messages:
                            self._take(message, tasks)
                            while self._num_errors >= _MOST_UNSENT_ERRORS:
                                await self._wait_until_taken()
                        # Do not use `asyncio.wait`: if the call is cancelled, the traceback would
                        # keep all tasks, and so all requests, in memory.
                        while self._num_running:
                            self._has_ended.clear()
                            await self._has_ended.wait()
                    except asyncio.CancelledError:
                        await self._cancel_in_slices()
                        raise
                self._is_over = True
                self._has_events.set()
        except ExceptionGroup as errors:
            error: BaseException = errors
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def _cancel_in_slices(self) -> None:
        """Cancel all requests, but only a few in each turn of the event loop."""
        requests = list(self._number_to_request.values())
        for i in range(0, len(requests), _CANCELLED_AT_ONCE):
            for request in requests[i : i + _CANCELLED_AT_ONCE]:
                if request.task is not None:
                    request.task.cancel()
            await asyncio.sleep(0)

    def _take(
        self,
        message: inference_pb2.GenerateManyRequest | RefusedRequest,
        tasks: asyncio.TaskGroup,
    ) -> None:
        check_range("number", message.number, 1, _MAX_NUMBER)
        in_use = self._number_to_request.get(message.number)
        if isinstance(message, inference_pb2.GenerateManyRequest) and message.HasField("leave"):
            if in_use is not None and in_use.task is not None:
                in_use.has_left = True
                in_use.task.cancel()
            return
        if in_use is not None:
            raise InvalidArgumentError(
                "number", f"is {message.number}; a live request of this call has this number"
            )
        request = self._number_to_request[message.number] = _Request(message.number)
        if isinstance(message, RefusedRequest):
            self._put_error(request, message.error)
            return
        self._num_running += 1
        request.task = tasks.create_task(self._serve(request, message))
        request.task.add_done_callback(lambda _: self._on_ended(request))

    async def _serve(self, request: _Request, message: inference_pb2.GenerateManyRequest) -> None:
        try:
            if message.traceparent:
                otel_context.attach(telemetry.extract(message.traceparent))
            live = await self._start(message)
            del message  # it may be large
            async with live:
                put = partial(self._put, request, live.request_id)
                await live.send_to(put, self)
        except Exception as error:  # noqa: BLE001 - the error ends the request, not the call
            self._put_error(request, error)

    def _start(self, message: inference_pb2.GenerateManyRequest) -> Awaitable[LiveRequest]:
        deadline = self._deadline
        if message.HasField("timeout_s"):
            check_range("timeout_s", message.timeout_s, 0, _MAX_TIMEOUT_S, open_below=True)
            at = asyncio.get_running_loop().time() + message.timeout_s
            deadline = at if deadline is None else min(at, deadline)
        match message.WhichOneof("action"):
            case "generate":
                generate = replace(
                    generate_request_from_proto(message.generate),
                    deadline=deadline,
                    priority=message.priority,
                    tenant=message.tenant,
                )
                return self._cells.generate(generate)
            case "resume":
                resume = resume_request_from_proto(message.resume, message.tenant, deadline)
                return self._cells.resume(resume, message.resume.model)
            case _:
                raise InvalidArgumentError(
                    "action", "is not set; generate, resume or leave must be set"
                )

    def _on_ended(self, request: _Request) -> None:
        """Forget the task of a request; if `leave` ended the request, tell the client."""
        self._num_running -= 1
        self._has_ended.set()
        request.task = None  # a cancelled task refers to its frame, and so to this request
        if request.has_left and self._number_to_request.get(request.number) is request:
            self._put_end(request, _CANCELLED, "the client has left the request")

    # --- the message ----------------------------------------------------------------------------

    def _put(self, request: _Request, request_id: str, event: Event) -> None:
        numbered = self._response.events.add()
        numbered.number = request.number
        if not request.is_named:
            request.is_named = True
            numbered.request_id = request_id
        self._num_bytes += _EVENT_BYTES
        if isinstance(event, OutputDelta):
            write_delta(event, numbered.delta)
            self._num_bytes += len(event.text) + 3 * len(event.token_ids)
            self._num_bytes += _LOGPROB_BYTES * len(event.logprobs)
        elif isinstance(event, OutputFinished):
            numbered.finished.CopyFrom(finished_to_proto(event))
        elif isinstance(event, Usage):
            numbered.usage.CopyFrom(usage_to_proto(event))
            del self._number_to_request[request.number]
        else:
            numbered.prompt.CopyFrom(prompt_scores_to_proto(event))
            self._num_bytes += _LOGPROB_BYTES * len(event.logprobs)
        self._has_events.set()

    def _put_error(self, request: _Request, error: Exception) -> None:
        if self._number_to_request.get(request.number) is not request:
            return  # its last event has already been put
        code, message, _ = error_to_status(error)
        ended = self._put_end(request, code.value[0], message)
        if isinstance(error, QuireError):
            ended.retryable = error.retryable
        if isinstance(error, TooBusyError):
            ended.retry_after_s = error.retry_after_s

    def _put_end(self, request: _Request, code: int, message: str) -> inference_pb2.RequestError:
        del self._number_to_request[request.number]
        error = self._response.events.add(number=request.number).error
        error.code, error.message = code, message
        self._num_bytes += _EVENT_BYTES + len(message)
        self._num_errors += 1
        self._has_events.set()
        return error

    def has_room(self) -> bool:
        return self._num_bytes < _MOST_UNSENT_BYTES

    async def wait_for_room(self) -> None:
        """Wait until `_response`, the next message, has room."""
        while not self.has_room():
            await self._wait_until_taken()

    async def _wait_until_taken(self) -> None:
        self._is_taken.clear()
        await self._is_taken.wait()

    async def _write(self) -> None:
        """Write one message after another; each has all events since the previous one."""
        while not self._is_over or self._response.events:
            self._has_events.clear()
            if response := self._take_response():
                await self._context.write(response)
            elif not self._is_over:
                await self._has_events.wait()

    def _take_response(self) -> inference_pb2.GenerateManyResponse | None:
        if not self._response.events:
            return None
        response, self._response = self._response, inference_pb2.GenerateManyResponse()
        self._num_bytes = self._num_errors = 0
        self._is_taken.set()
        return response

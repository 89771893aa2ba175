"""A Python client of the service, synchronous and asynchronous.

    from quire.client import Client, SamplingParams

    with Client(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        for event in client.generate("def add(", SamplingParams(max_tokens=64), resumable=True):
            ...

Every method raises what the service says as an error of `rpc.errors`: InvalidArgumentError,
TooBusyError (with `retry_after_s`), UnavailableError, and so on. `timeout_s` becomes the call's
deadline, which the service honours. `priority` and `tenant` say how urgent a request is (higher is
sooner) and whom it is for; what that does is the scheduler's policy.

A client may know several routers of a service, all alike: it stays with one until that fails. With
`resumable=True` a stream goes on when its router dies or the connection breaks, through another
router or the same one; the caller sees a pause. `retry=Retry()` has other calls that generate sent
anew, too, if they were refused because the service is too busy, or not there: when it says, and as
long as most succeed.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack, cast

import grpc
import grpc.aio

from quire import activity_wire, kv_wire, wire
from quire.activity_types import WorkerActivity
from quire.continuation import Continuation
from quire.kv_types import WorkerKv
from quire.retry import Retry, RetryBudget
from quire.routers import Routers, Targets, TimeLimit, split_targets, start_call
from quire.types import (
    BeamSearch,
    ChatMessage,
    Completion,
    Event,
    FinishReason,
    GenerateOptions,
    Load,
    Model,
    Output,
    OutputDelta,
    OutputError,
    OutputFinished,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc import telemetry
from rpc.channel import open_blocking_channel, open_channel
from rpc.errors import QuireError
from rpc.status import status_to_error
from rpc.tls import ClientTls
from rpc.transport import DEFAULT_MAX_MESSAGE_MB

__all__ = [
    "AsyncClient",
    "BeamSearch",
    "ChatMessage",
    "Client",
    "ClientTls",
    "Completion",
    "Event",
    "FinishReason",
    "GenerateOptions",
    "Load",
    "Model",
    "Output",
    "OutputDelta",
    "OutputError",
    "OutputFinished",
    "Retry",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
    "WorkerKv",
]

DEFAULT_SAMPLING = SamplingParams()


_CANCEL_TIMEOUT_S = 2.0


@contextlib.contextmanager
def _quire_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        # Synchronous calls raise a private class that has the same methods.
        raise status_to_error(cast("grpc.aio.AioRpcError", error)) from None


class Client:
    """Blocks. Threads may share one."""

    def __init__(
        self,
        target: Targets,
        max_message_mb: int = DEFAULT_MAX_MESSAGE_MB,
        *,
        retry: Retry | None = None,
        api_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        """The first call connects; see `Targets`.

        `api_key` is for services that ask for one. Without `tls` calls, and the key, travel in the
        clear; a Unix socket needs none.
        """
        self._metadata = wire.api_key_to_metadata(api_key)
        self._channels = [
            open_blocking_channel(target, max_message_mb, tls) for target in split_targets(target)
        ]
        self._routers = Routers(self._channels)
        self._retry = retry
        self._budget = RetryBudget()

    @property
    def _stub(self) -> InferenceServiceStub:
        return self._routers.stub

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what is still running."""
        for channel in self._channels:
            channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Event]:
        """Yield events as they happen; closing the iterator ends the work."""
        metadata = [*self._metadata, *wire.precedence_to_metadata(priority, tenant)]
        request = wire.generate_request_to_proto(prompt, sampling, options)
        continuation = Continuation(request, self._retry, self._budget)
        time_limit = TimeLimit(timeout_s)
        try:
            while not continuation.is_complete:
                stub = self._stub
                call = start_call(
                    stub,
                    continuation.next_request(),
                    time_limit.remaining_s(),
                    [*telemetry.inject_metadata(), *metadata],
                )
                try:
                    with _quire_errors():
                        for response in call:
                            if (
                                event := continuation.take(wire.event_from_proto(response))
                            ) is not None:
                                yield event
                    continuation.check_complete()
                except QuireError as error:
                    delay_s = continuation.failed(error, time.monotonic())
                    time_limit.check(delay_s, error)
                    self._routers.failed(stub, error)
                    time.sleep(delay_s)
                finally:
                    call.cancel()
        except QuireError:  # it ends by itself, only later
            raise
        except BaseException:  # the caller wants no more, be it between two calls
            if continuation.is_resumable and not continuation.is_complete:
                cancel = inference_pb2.CancelRequest(request_id=continuation.request_id)
                with contextlib.suppress(Exception):
                    self._stub.Cancel(cancel, timeout=_CANCEL_TIMEOUT_S, metadata=metadata)
            raise

    def generate_once(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Give the outputs when all are complete."""
        if options.get("resumable"):
            options["request_id"] = options.get("request_id") or uuid.uuid4().hex
            events = self.generate(
                prompt, sampling, priority=priority, tenant=tenant, timeout_s=timeout_s, **options
            )
            return wire.completion_from_events(options["request_id"], list(events))
        metadata = [*self._metadata, *wire.precedence_to_metadata(priority, tenant)]
        request = wire.generate_request_to_proto(prompt, sampling, options)
        continuation = Continuation(request, self._retry, self._budget)
        time_limit = TimeLimit(timeout_s)
        while True:
            stub = self._stub
            try:
                with _quire_errors():
                    response = stub.GenerateOnce(
                        inference_pb2.GenerateOnceRequest(request=request),
                        timeout=time_limit.remaining_s(),
                        metadata=[*telemetry.inject_metadata(), *metadata],
                    )
                return wire.completion_from_proto(response)
            except QuireError as error:
                delay_s = continuation.failed(error, time.monotonic())
                time_limit.check(delay_s, error)
                self._routers.failed(stub, error)
                time.sleep(delay_s)

    def tokenize(
        self,
        text_or_chat: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Give the token ids of a text, or of a chat ended by the assistant's cue."""
        request = wire.tokenize_request_to_proto(
            text_or_chat, model, add_special_tokens=add_special_tokens
        )
        with _quire_errors():
            return tuple(
                self._stub.Tokenize(request, timeout=timeout_s, metadata=self._metadata).token_ids
            )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Give the text of some token ids."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        with _quire_errors():
            text: str = self._stub.Detokenize(
                request, timeout=timeout_s, metadata=self._metadata
            ).text
        return text

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Give the models served."""
        request = inference_pb2.ListModelsRequest()
        with _quire_errors():
            return wire.models_from_proto(
                self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
            )

    def describe_kv(
        self,
        *,
        worker: str = "",
        first_seq_id: int = 0,
        max_sequences: int | None = None,
        first_block: int = 0,
        max_blocks: int | None = None,
        ref_counts: bool = False,
        block_tables: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[WorkerKv, ...]:
        """Say who holds which KV blocks; what did not fit is asked for with the answer's `next_…`.

        `worker` asks for one worker only. Bounds that are None are the service's defaults.
        """
        request = kv_wire.describe_kv_request_to_proto(
            worker,
            first_seq_id,
            max_sequences,
            first_block,
            max_blocks,
            ref_counts=ref_counts,
            block_tables=block_tables,
        )
        with _quire_errors():
            response = self._stub.DescribeKv(request, timeout=timeout_s, metadata=self._metadata)
        return kv_wire.workers_kv_from_proto(response)

    def describe_activity(
        self,
        *,
        worker: str = "",
        max_steps: int | None = None,
        after_step_id: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[WorkerActivity, ...]:
        """Say what the workers are doing: their loads, and the latest `max_steps` steps of each.

        `after_step_id` leaves out what is known of one `worker` already.
        """
        request = activity_wire.describe_activity_request_to_proto(worker, max_steps, after_step_id)
        with _quire_errors():
            response = self._stub.DescribeActivity(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return activity_wire.activity_from_proto(response)

    def load(self, *, timeout_s: float | None = None) -> Load:
        """Say how busy the service is."""
        request = inference_pb2.GetLoadRequest()
        with _quire_errors():
            return wire.load_from_proto(
                self._stub.GetLoad(request, timeout=timeout_s, metadata=self._metadata).load
            )


class AsyncClient:
    """The same for asyncio; belongs to the event loop it is made in."""

    def __init__(
        self,
        target: Targets,
        max_message_mb: int = DEFAULT_MAX_MESSAGE_MB,
        *,
        retry: Retry | None = None,
        api_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        """As for `Client`."""
        self._metadata = wire.api_key_to_metadata(api_key)
        self._channels = [
            open_channel(target, max_message_mb, tls) for target in split_targets(target)
        ]
        self._routers = Routers(self._channels)
        self._retry = retry
        self._budget = RetryBudget()

    @property
    def _stub(self) -> InferenceServiceStub:
        return self._routers.stub

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what is still running."""
        for channel in self._channels:
            await channel.close(grace=None)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[Event]:
        """Yield events as they happen; closing the iterator ends the work."""
        metadata = [*self._metadata, *wire.precedence_to_metadata(priority, tenant)]
        request = wire.generate_request_to_proto(prompt, sampling, options)
        continuation = Continuation(request, self._retry, self._budget)
        time_limit = TimeLimit(timeout_s)
        try:
            while not continuation.is_complete:
                stub = self._stub
                call = start_call(
                    stub, continuation.next_request(), time_limit.remaining_s(), metadata
                )
                try:
                    with _quire_errors():
                        async for response in call:
                            if (
                                event := continuation.take(wire.event_from_proto(response))
                            ) is not None:
                                yield event
                    continuation.check_complete()
                except QuireError as error:
                    delay_s = continuation.failed(error, time.monotonic())
                    time_limit.check(delay_s, error)
                    self._routers.failed(stub, error)
                    await asyncio.sleep(delay_s)
                finally:
                    call.cancel()
        except QuireError:  # it ends by itself, only later
            raise
        except BaseException:  # the caller wants no more, be it between two calls
            if continuation.is_resumable and not continuation.is_complete:
                cancel = inference_pb2.CancelRequest(request_id=continuation.request_id)
                with contextlib.suppress(Exception):
                    await self._stub.Cancel(cancel, timeout=_CANCEL_TIMEOUT_S, metadata=metadata)
            raise

    async def generate_once(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams = DEFAULT_SAMPLING,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Give the outputs when all are complete."""
        if options.get("resumable"):
            options["request_id"] = options.get("request_id") or uuid.uuid4().hex
            events = self.generate(
                prompt, sampling, priority=priority, tenant=tenant, timeout_s=timeout_s, **options
            )
            return wire.completion_from_events(
                options["request_id"], [event async for event in events]
            )
        metadata = [*self._metadata, *wire.precedence_to_metadata(priority, tenant)]
        request = wire.generate_request_to_proto(prompt, sampling, options)
        continuation = Continuation(request, self._retry, self._budget)
        time_limit = TimeLimit(timeout_s)
        while True:
            stub = self._stub
            try:
                with _quire_errors():
                    response = await stub.GenerateOnce(
                        inference_pb2.GenerateOnceRequest(request=request),
                        timeout=time_limit.remaining_s(),
                        metadata=metadata,
                    )
                return wire.completion_from_proto(response)
            except QuireError as error:
                delay_s = continuation.failed(error, time.monotonic())
                time_limit.check(delay_s, error)
                self._routers.failed(stub, error)
                await asyncio.sleep(delay_s)

    async def tokenize(
        self,
        text_or_chat: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Give the token ids of a text, or of a chat ended by the assistant's cue."""
        request = wire.tokenize_request_to_proto(
            text_or_chat, model, add_special_tokens=add_special_tokens
        )
        with _quire_errors():
            return tuple(
                (
                    await self._stub.Tokenize(request, timeout=timeout_s, metadata=self._metadata)
                ).token_ids
            )

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Give the text of some token ids."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        with _quire_errors():
            text: str = (
                await self._stub.Detokenize(request, timeout=timeout_s, metadata=self._metadata)
            ).text
        return text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Give the models served."""
        request = inference_pb2.ListModelsRequest()
        with _quire_errors():
            return wire.models_from_proto(
                await self._stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
            )

    async def describe_kv(
        self,
        *,
        worker: str = "",
        first_seq_id: int = 0,
        max_sequences: int | None = None,
        first_block: int = 0,
        max_blocks: int | None = None,
        ref_counts: bool = False,
        block_tables: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[WorkerKv, ...]:
        """Say who holds which KV blocks; what did not fit is asked for with the answer's `next_…`.

        `worker` asks for one worker only. Bounds that are None are the service's defaults.
        """
        request = kv_wire.describe_kv_request_to_proto(
            worker,
            first_seq_id,
            max_sequences,
            first_block,
            max_blocks,
            ref_counts=ref_counts,
            block_tables=block_tables,
        )
        with _quire_errors():
            response = await self._stub.DescribeKv(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return kv_wire.workers_kv_from_proto(response)

    async def describe_activity(
        self,
        *,
        worker: str = "",
        max_steps: int | None = None,
        after_step_id: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[WorkerActivity, ...]:
        """Say what the workers are doing: their loads, and the latest `max_steps` steps of each.

        `after_step_id` leaves out what is known of one `worker` already.
        """
        request = activity_wire.describe_activity_request_to_proto(worker, max_steps, after_step_id)
        with _quire_errors():
            response = await self._stub.DescribeActivity(
                request, timeout=timeout_s, metadata=self._metadata
            )
        return activity_wire.activity_from_proto(response)

    async def load(self, *, timeout_s: float | None = None) -> Load:
        """Say how busy the service is."""
        request = inference_pb2.GetLoadRequest()
        with _quire_errors():
            response = await self._stub.GetLoad(request, timeout=timeout_s, metadata=self._metadata)
        return wire.load_from_proto(response.load)

"""The client for asyncio; see `quire.client`."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, Unpack

from contract.errors import QuireError
from quire.client import wire
from quire.client.attempts import Attempts, TimeLimit
from quire.client.continuation import Continuation
from quire.client.retry import Retry, RetryBudget
from quire.client.routers import Routers, Targets
from quire.client.types import (
    DEFAULT_SAMPLING,
    ChatMessage,
    Completion,
    Embeddings,
    EmbedOptions,
    Event,
    GenerateOptions,
    Load,
    Model,
    SamplingParams,
)
from quire.v1 import common_pb2, inference_pb2, kv_pb2
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls
from rpc.status import calling
from rpc.transport import DEFAULT_MAX_MESSAGE_MB


@dataclass(frozen=True, slots=True)
class Transport:
    """How a client opens channels, and how it waits between two calls."""

    open_channel: Callable[..., Any]
    sleep: Callable[[float], Awaitable[None]]


ASYNCIO: Final = Transport(open_channel, asyncio.sleep)


class AsyncClient:
    """The client for asyncio, with `Client`'s methods.

    A client may be used only in the event loop in which it was made. `Client` runs the
    methods of this class without an event loop, on a transport that blocks. So these methods must
    await nothing but calls on the transport's channels, and the transport's `sleep`.
    """

    def __init__(
        self,
        target: Targets,
        max_message_mb: int = DEFAULT_MAX_MESSAGE_MB,
        *,
        retry: Retry | None = None,
        api_key: str = "",
        tls: ClientTls | None = None,
        transport: Transport = ASYNCIO,
    ) -> None:
        """For all arguments except `transport` see `Client`."""
        self._routers = Routers(
            target,
            lambda each, pings: transport.open_channel(each, max_message_mb, tls, pings=pings),
        )
        self._metadata = wire.api_key_to_metadata(api_key)
        self._retry = retry
        self._budget = RetryBudget()
        self._sleep = transport.sleep

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
        """Close the connections, which ends all calls that still run."""
        for channel in self._routers.channels:
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
    ) -> AsyncGenerator[Event]:
        """Yield events as they arrive; closing the iterator cancels the request."""
        attempts = self._attempts(prompt, sampling, options, priority, tenant, timeout_s)
        try:
            while not attempts.is_complete:
                call = attempts.stream()
                try:
                    with calling():
                        async for response in call:
                            if (event := attempts.receive(response)) is not None:
                                yield event
                    attempts.check_complete()
                except QuireError as error:
                    await self._sleep(attempts.failed(error))
                finally:
                    call.cancel()
        except QuireError:  # the request has failed, or will end at the service
            raise
        except BaseException:  # the caller has stopped, perhaps during a wait between two calls
            if attempts.must_be_cancelled:
                with contextlib.suppress(Exception):
                    await attempts.cancel()
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
        """Return all outputs when they are complete."""
        if options.get("resumable"):
            options["request_id"] = options.get("request_id") or uuid.uuid4().hex
            events = self.generate(
                prompt, sampling, priority=priority, tenant=tenant, timeout_s=timeout_s, **options
            )
            return wire.completion_from_events(
                options["request_id"], [event async for event in events]
            )
        attempts = self._attempts(prompt, sampling, options, priority, tenant, timeout_s)
        while True:
            try:
                with calling():
                    return wire.completion_from_proto(await attempts.once())
            except QuireError as error:
                await self._sleep(attempts.failed(error))

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Return an embedding of each input, which is text or token ids."""
        request = wire.embed_request_to_proto(inputs, options)
        precedence = wire.precedence_to_metadata(priority, tenant)
        return wire.embeddings_from_proto(await self._call("Embed", request, timeout_s, precedence))

    async def tokenize(
        self,
        text_or_chat: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a text, or of a chat with the generation prompt."""
        request = wire.tokenize_request_to_proto(
            text_or_chat, model, add_special_tokens=add_special_tokens
        )
        return tuple((await self._call("Tokenize", request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str((await self._call("Detokenize", request, timeout_s)).text)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        return wire.models_from_proto(await self._call("ListModels", request, timeout_s))

    async def load(self, *, model: str = "", timeout_s: float | None = None) -> Load:
        """Return the load of the service, or of one of its models."""
        response = await self._call("GetLoad", inference_pb2.GetLoadRequest(model=model), timeout_s)
        load: Load = response.load
        return load

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
    ) -> tuple[kv_pb2.WorkerKv, ...]:
        """Return which sequences hold which KV blocks, as messages of `quire.v1.kv_pb2`.

        `worker` selects one worker. A limit that is None is the service's default. If a worker has
        more sequences than the limit, its answer has a `next_seq_id`. For the next sequences, call
        again with this `worker`, and with the `next_seq_id` as `first_seq_id`. In the same way, a
        tier's `next_block` serves as `first_block` for the next blocks.
        """
        query = kv_pb2.KvQuery(
            worker=worker,
            first_seq_id=first_seq_id,
            max_sequences=max_sequences,
            first_block=first_block,
            max_blocks=max_blocks,
            ref_counts=ref_counts,
            block_tables=block_tables,
        )
        request = inference_pb2.DescribeKvRequest(query=query)
        return tuple((await self._call("DescribeKv", request, timeout_s)).workers)

    async def describe_activity(
        self,
        *,
        worker: str = "",
        max_steps: int | None = None,
        after_step_id: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[common_pb2.WorkerActivity, ...]:
        """Return the workers' loads, and the latest `max_steps` steps of each.

        Steps up to `after_step_id` are left out. Set `after_step_id` only together with `worker`,
        because each worker has its own step ids.
        """
        query = common_pb2.ActivityQuery(
            worker=worker, max_steps=max_steps, after_step_id=after_step_id
        )
        request = inference_pb2.DescribeActivityRequest(query=query)
        return tuple((await self._call("DescribeActivity", request, timeout_s)).workers)

    def _attempts(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: GenerateOptions,
        priority: int,
        tenant: str,
        timeout_s: float | None,
    ) -> Attempts:
        request = wire.request_to_proto(prompt, sampling, options)
        return Attempts(
            self._routers,
            request,
            Continuation(request, self._retry, self._budget),
            TimeLimit(timeout_s),
            [*self._metadata, *wire.precedence_to_metadata(priority, tenant)],
        )

    async def _call(
        self,
        method: str,
        request: Any,
        timeout_s: float | None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Any:
        call = getattr(self._routers.current.stub, method)
        with calling():
            return await call(request, timeout=timeout_s, metadata=[*self._metadata, *metadata])

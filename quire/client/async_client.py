"""The client for asyncio; see `quire.client`."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

from contract.errors import QuireError
from quire.client import questions, wire
from quire.client.activity_types import WorkerActivity
from quire.client.attempts import Service
from quire.client.kv_types import WorkerKv
from quire.client.questions import Question
from quire.client.retry import Retry
from quire.client.routers import Targets
from quire.client.types import (
    DEFAULT_SAMPLING,
    ChatMessage,
    Completion,
    Event,
    GenerateOptions,
    Load,
    Model,
    SamplingParams,
)
from rpc.peers.channel import open_channel
from rpc.security.tls import ClientTls
from rpc.status import calling
from rpc.transport import DEFAULT_MAX_MESSAGE_MB

T = TypeVar("T")


class AsyncClient:
    """The same as `Client` for asyncio; belongs to the event loop it is made in."""

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
        self._service = Service(
            target,
            lambda each, pings: open_channel(each, max_message_mb, tls, pings=pings),
            retry=retry,
            api_key=api_key,
        )

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
        for channel in self._service.routers.channels:
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
        attempts = self._service.attempts(
            prompt, sampling, options, priority=priority, tenant=tenant, timeout_s=timeout_s
        )
        try:
            while not attempts.is_complete:
                call = attempts.stream()
                try:
                    with calling():
                        async for response in call:
                            if (event := attempts.take(response)) is not None:
                                yield event
                    attempts.check_complete()
                except QuireError as error:
                    await asyncio.sleep(attempts.failed(error))
                finally:
                    call.cancel()
        except QuireError:  # it ends by itself, only later
            raise
        except BaseException:  # the caller wants no more, be it between two calls
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
        """Give the outputs when all are complete."""
        if options.get("resumable"):
            options["request_id"] = options.get("request_id") or uuid.uuid4().hex
            events = self.generate(
                prompt, sampling, priority=priority, tenant=tenant, timeout_s=timeout_s, **options
            )
            return wire.completion_from_events(
                options["request_id"], [event async for event in events]
            )
        attempts = self._service.attempts(
            prompt, sampling, options, priority=priority, tenant=tenant, timeout_s=timeout_s
        )
        while True:
            try:
                with calling():
                    return wire.completion_from_proto(await attempts.once())
            except QuireError as error:
                await asyncio.sleep(attempts.failed(error))

    async def tokenize(
        self,
        text_or_chat: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Give the token ids of a text, or of a chat ended by the assistant's cue."""
        question = questions.tokenize(text_or_chat, model, add_special_tokens=add_special_tokens)
        return await self._ask(question, timeout_s)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Give the text of some token ids."""
        question = questions.detokenize(token_ids, model, skip_special_tokens=skip_special_tokens)
        return await self._ask(question, timeout_s)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Give the models served."""
        return await self._ask(questions.models(), timeout_s)

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
        question = questions.describe_kv(
            worker,
            first_seq_id,
            max_sequences,
            first_block,
            max_blocks,
            ref_counts=ref_counts,
            block_tables=block_tables,
        )
        return await self._ask(question, timeout_s)

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
        question = questions.describe_activity(worker, max_steps, after_step_id)
        return await self._ask(question, timeout_s)

    async def load(self, *, timeout_s: float | None = None) -> Load:
        """Say how busy the service is."""
        return await self._ask(questions.load(), timeout_s)

    async def _ask(self, question: Question[T], timeout_s: float | None) -> T:
        method = getattr(self._service.routers.current.stub, question.method)
        with calling():
            response = await method(
                question.request, timeout=timeout_s, metadata=self._service.metadata
            )
        return question.read(response)

"""Checks, prepares, submits and resumes requests, for every API."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.trace import StatusCode

from contract.codec.request import stop_options_to_bytes
from contract.errors import (
    AbortedError,
    DeadlineExceededError,
    NotFoundError,
    QuireError,
    UnavailableError,
)
from contract.outputs import Event
from contract.request import GenerateRequest, Model, ResumeRequest, StopOptions
from contract.sampling import BeamSearch, SamplingParams
from router import metrics
from router.access.api_keys import key_of_call
from router.access.quotas import QuotaShare
from router.access.tenancy import claim
from router.live.live_request import LiveRequest, ReplayRecord
from router.live.output import LiveOutput
from router.live.stop_strings import StopMatcher
from router.live.usage import UsageKey
from router.request import span as request_span
from router.request.admission import AdmittedRequest
from router.request.model_text import ModelText
from router.request.shared_admission import SharedAdmission
from router.request.validation import check_request, complete_sampling
from router.schedulers.messages import Resumption
from router.schedulers.pool import Schedulers
from router.schedulers.served_model import ServedModel
from router.text.chat_settings import ChatSettings
from router.text.tokenizer import Tokenizers
from rpc.observe import telemetry

_SEED_BITS = 63
"""Number of bits of a random seed, which must fit a signed 64-bit integer."""


class Inference:
    """One model, as the APIs use it: its requests, its text conversion and its schedulers."""

    def __init__(
        self,
        model_name: str,
        tokenizers: Tokenizers,
        schedulers: Schedulers,
        shared: SharedAdmission,
        *,
        tokenizer_threads: int,
        chats: ChatSettings = ChatSettings(),  # noqa: B008 - it never changes
        stream_interval: int = 1,
    ) -> None:
        """Serve one model; `model_name` is its name in the router's flags.

        `stream_interval` is the default for requests that do not set it.
        """
        self.name = model_name
        self._metrics = metrics.of_model(model_name)
        self.shared = shared
        self._stream_interval = stream_interval
        self.schedulers = schedulers
        self._admission, self._quotas = shared.admission, shared.quotas
        self.model = ServedModel(model_name, schedulers)
        self.text = ModelText(
            tokenizers,
            self.model,
            num_threads=tokenizer_threads,
            max_pending_prompts=shared.max_live_requests,
            chats=chats,
        )

    def check_room(self, model: str) -> None:
        """Raise some errors of `generate` early, for APIs that do other work before `generate`.

        Raises `NotFoundError` for an unknown model, and `TooBusyError` if the schedulers' queues
        are full.
        """
        with refusals_counted(self.name):
            self.model.check_name(model)
            self.schedulers.check_room(1)

    async def check_capacity(self, num_requests: int, n: int) -> None:
        """Check that all requests of one call, with `n` outputs each, could be live at once.

        Raises `InvalidArgumentError` if the requests are too many even for an idle service, so that
        a retry is useless.
        """
        with refusals_counted(self.name):
            self._admission.check_capacity(num_requests)
            await self.schedulers.check_capacity(num_requests * n)

    async def generate(self, request: GenerateRequest, *, is_kept: bool = False) -> LiveRequest:
        """Submit a request; the caller must use the returned `LiveRequest` in an `async with`.

        If `is_kept` is true, the request computes a turn, that is, a stored call
        (`router/stored_turns`). The turn's usage is stored with the turn, and not added to the
        router's counts (`SharedAdmission.usage`).

        Raises `InvalidArgumentError` that names field, value and limit; `NotFoundError` for an
        unknown model; `AlreadyExistsError` if a request with this id is live; `TooBusyError` if
        `max_live_requests` are live, or the schedulers' queues are full; `UnavailableError` while
        the router drains or has no scheduler; `DeadlineExceededError` if the deadline passed while
        the prompt was tokenized.
        """
        with refusals_counted(self.name):
            return await self._generate(request, is_kept=is_kept)

    async def _generate(self, request: GenerateRequest, *, is_kept: bool) -> LiveRequest:
        model = self.model.info(request.model)
        check_request(request, model, self.text.max_text_bytes(model))
        # Check this before the expensive work, because under overload most requests end here.
        self.schedulers.check_room(request.n)
        if self.shared.has_api_keys:
            request = claim(request)
        stream_interval = request.stream_interval or self._stream_interval
        request = replace(request, stream_interval=stream_interval)
        request_id = request.request_id or uuid.uuid4().hex
        admitted = self._admission.admit(request.tenant, request_id, self.name)
        share: QuotaShare | None = None
        try:
            share = self._quotas.begin(request.tenant, asyncio.get_running_loop().time())
            live = await self._submit(request, model, admitted, share, is_kept=is_kept)
        except BaseException as error:
            if isinstance(error, Exception):
                admitted.span.set_status(StatusCode.ERROR, str(error))
            if share is not None:
                share.end(0)
            self._admission.release(request.tenant, request_id)
            raise
        self._metrics.prompt_tokens.inc(len(live.prompt_token_ids))
        self._metrics.request_prompt_tokens.observe(len(live.prompt_token_ids))
        return live

    async def _submit(
        self,
        request: GenerateRequest,
        model: Model,
        admitted: AdmittedRequest,
        share: QuotaShare,
        *,
        is_kept: bool,
    ) -> LiveRequest:
        span = admitted.span
        start_s = time.time()
        directory = self.model.directory
        prepared = await self.text.prepare(request)
        if admitted.ended_by is not None:
            raise admitted.ended_by
        if self.model.directory != directory:  # the token ids belong to the previous model
            raise UnavailableError("the service now has another model")
        prompt = prepared.prompt_token_ids
        context = trace.set_span_in_context(span)
        if span.is_recording():
            attributes = {"gen_ai.usage.input_tokens": len(prompt)}
            telemetry.record_span("tokenize", context, start_s, time.time(), attributes)
        if request.deadline is not None and asyncio.get_running_loop().time() >= request.deadline:
            raise DeadlineExceededError("the deadline passed before the request was submitted")
        sampling = complete_sampling(
            request.sampling,
            len(prompt),
            model,
            secrets.randbits(_SEED_BITS),
            cuts_max_tokens=request.cuts_max_tokens,
            is_pair=request.pair is not None,
        )
        sampling = replace(sampling, structured=prepared.structured, adapter=model.adapter)
        if sampling.pooling is not None:
            pooling = replace(sampling.pooling, num_first_tokens=prepared.num_first_tokens)
            sampling = replace(sampling, pooling=pooling)
        share.reserve(
            _most_tokens(len(prompt), request.n, request.beam, sampling),
            asyncio.get_running_loop().time(),
        )
        record = ReplayRecord(
            request_id=admitted.request_id,
            first_seq_key=self.schedulers.reserve_seq_keys(request.n),
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=request.cache_salt,
            cache_pin_s=request.cache_pin_s,
            traceparent=telemetry.inject(context),
            priority=request.priority,
            tenant=request.tenant,
            deadline=request.deadline,
            beam=request.beam,
            resume_record=stop_options_to_bytes(request) if request.resumable else None,
        )
        stop_options = StopOptions(
            request.stop,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            request.thinking,
            request.stream_interval or 1,
        )
        live = self._start(record, request.n, stop_options, model, share, is_kept=is_kept)
        if span.is_recording():
            span.set_attributes(request_span.submitted(live))
        self.schedulers.submit(live)
        return live

    def _start(
        self,
        record: ReplayRecord,
        n: int,
        stop_options: StopOptions,
        model: Model,
        share: QuotaShare,
        *,
        is_kept: bool = False,
    ) -> LiveRequest:
        end_token_ids = frozenset(record.sampling.stop_token_ids)
        if not record.sampling.ignore_eos:
            end_token_ids |= frozenset(model.eos_token_ids)
        outputs = [
            LiveOutput(
                index,
                self.text.detokenizer(skip_special_tokens=stop_options.skip_special_tokens),
                StopMatcher(
                    stop_options.stop,
                    include_in_output=stop_options.include_stop_str_in_output,
                )
                if stop_options.stop
                else None,
                end_token_ids,
                stop_options.thinking,
                stop_options.stream_interval,
            )
            for index in range(n)
        ]
        adapter = "" if record.sampling.adapter is None else record.sampling.adapter.name
        live = LiveRequest(
            record,
            outputs,
            model=adapter or model.id,
            metrics=self._metrics,
            usage_key=UsageKey(record.tenant, key_of_call(), model.parent or model.id, adapter),
            cancel=self.schedulers.cancel,
            leave=self.schedulers.leave,
            on_closed=lambda live: self._on_closed(live, share, is_kept=is_kept),
        )
        self._admission.add(live)
        return live

    async def resume(self, request: ResumeRequest, *, is_free: bool = False) -> LiveRequest:
        """Continue a request after the events that its client has.

        As after `generate`, the caller must use the returned `LiveRequest` in an `async with`. If
        `is_free` is true, the call is not charged to the tenant's quota.

        This method does not check whether the client may act for `request.tenant`; `Cells.resume`
        checks this before. If another call, at any router, is reading the request, that call ends
        with `AbortedError`. Raises `NotFoundError` if this tenant has no such resumable request;
        `InvalidArgumentError` if `request.received` has more tokens than the request has produced;
        `FailedPreconditionError` if log-probabilities that the client lacks are lost;
        `TooBusyError` and `UnavailableError` as `generate` does.
        """
        live = await self._take_over(
            request.request_id, request.tenant, request.deadline, is_free=is_free
        )
        try:
            live.skip(request.received, has_prompt_scores=request.has_prompt_scores)
        except QuireError:
            await live.aclose()
            raise
        return live

    def restart(self, found: Resumption, events: Iterable[Event]) -> LiveRequest:
        """Continue a turn's request after its stored `events`.

        `found` has the request's stored record. The reader of the returned request gets all tokens,
        including the tokens of `events`. Raises the errors of `generate`.
        """
        record = found.record
        adapter = record.sampling.adapter
        model = self.model.info("" if adapter is None else adapter.name)
        admitted = self._admission.admit(record.tenant, record.request_id, self.name)
        try:
            share = self._quotas.begin(record.tenant, asyncio.get_running_loop().time())
        except BaseException:
            self._admission.release(admitted.tenant, admitted.request_id)
            raise
        try:
            record = replace(
                record,
                first_seq_key=self.schedulers.reserve_seq_keys(found.n),
                traceparent=telemetry.inject(trace.set_span_in_context(admitted.span)),
                resume_record=None,
            )
            live = self._start(record, found.n, found.stop_options, model, share, is_kept=True)
        except BaseException:
            share.end(0)
            self._admission.release(admitted.tenant, admitted.request_id)
            raise
        try:
            live.replay(events)
        except BaseException:
            live.cancel()
            raise
        if live.live_seq_keys:
            live.num_submits = 1  # the request was accepted before
            self.schedulers.submit(live)
        return live

    async def cancel_of(self, tenant: str, request_id: str) -> None:
        """Cancel a tenant's resumable request.

        The caller must have checked that the client may cancel the request. The call is not charged
        to the tenant's quota.
        """
        (await self._take_over(request_id, tenant, None, is_free=True)).cancel()

    async def _take_over(
        self, request_id: str, tenant: str, deadline: float | None, *, is_free: bool = False
    ) -> LiveRequest:
        model = self.model.info()
        if (tenant, request_id) in self._admission:
            self._end_reader(request_id, tenant)
        admitted = self._admission.admit(tenant, request_id, self.name)
        share: QuotaShare | None = None
        try:
            now = asyncio.get_running_loop().time()
            new_share = share = self._quotas.begin(tenant, now, is_free=is_free)
            # The task that reads the scheduler's stream runs `_start_resumed`, which needs this
            # call's API key.
            caller = copy_context()
            return await self.schedulers.resume(
                request_id,
                tenant,
                lambda found: caller.run(
                    self._start_resumed, found, admitted, deadline, model, new_share
                ),
            )
        except BaseException:
            # The request is absent if it was resumed and its reader has left.
            if (tenant, request_id) in self._admission:
                if share is not None:
                    share.end(0)
                self._admission.release(tenant, request_id)
            raise

    def _start_resumed(
        self,
        found: Resumption,
        admitted: AdmittedRequest,
        deadline: float | None,
        model: Model,
        share: QuotaShare,
    ) -> LiveRequest:
        record = replace(found.record, deadline=deadline)
        if (record.tenant, record.request_id) != (admitted.tenant, admitted.request_id):
            raise QuireError("the scheduler resumed a different request")
        if admitted.ended_by is not None:
            raise admitted.ended_by
        num_tokens = _most_tokens(
            len(record.prompt_token_ids), found.n, record.beam, record.sampling
        )
        share.take_up(record.request_id, num_tokens)
        live = self._start(record, found.n, found.stop_options, model, share)
        live.is_resumed = True
        return live

    def _end_reader(self, request_id: str, tenant: str) -> None:
        """End the call that reads a request at this router, so that another call can resume it."""
        admitted = self._admission.find(tenant, request_id)
        if admitted is None or admitted.model != self.name:
            raise NotFoundError(f"request {request_id!r} belongs to another model")
        if (live := admitted.live) is None:
            raise UnavailableError(f"request {request_id!r} is being resumed by another call")
        if live.record.resume_record is None:
            raise NotFoundError(
                f"request {request_id!r} cannot be resumed: it was not submitted as resumable"
            )
        # While no scheduler has the request, this router has the only copy.
        if live.live_seq_keys and not self.schedulers.is_kept(live):
            raise self.schedulers.unavailable()
        # Do not cancel the request: if the new call is refused, the request can still be resumed.
        self.schedulers.leave(live)
        live.take_away(AbortedError(f"request {request_id!r} was resumed by another call"))

    def _on_closed(self, live: LiveRequest, share: QuotaShare, *, is_kept: bool) -> None:
        if self.shared.usage is not None and not is_kept:
            self.shared.usage.add(live.usage_key, live.used)
        if self.shared.audit is not None:
            self.shared.audit.add(live, self.text.decoder())
        if live.goes_on:
            # This router does not learn how the request ends
            now = asyncio.get_running_loop().time()
            share.leave(live.request_id, now, now + self.schedulers.resume_grace_s)
        elif live.num_cached_tokens is None:
            share.end(0)  # the scheduler never admitted it
        else:
            share.end(len(live.prompt_token_ids) + live.num_completion_tokens)
        self._admission.close(live)

    def hand_over(self) -> None:
        """Leave resumable requests to their schedulers, because this router ends.

        The requests continue, and clients can resume them at another router.
        """
        for each in self._admission.admitted:
            live = each.live
            if each.model == self.name and live and live.record.resume_record is not None:
                self.schedulers.leave(live)
                live.take_away(
                    UnavailableError(
                        f"the router is shutting down; request {live.request_id!r} continues and"
                        " can be resumed at another router"
                    )
                )

    def close(self) -> None:
        """End the threads that work on text."""
        self.text.close()


def _most_tokens(
    num_prompt_tokens: int, n: int, beam: BeamSearch | None, sampling: SamplingParams
) -> int:
    """Return the maximum number of tokens of a request, prompt and outputs together."""
    assert sampling.max_tokens is not None, "complete_sampling sets it"
    return num_prompt_tokens + (n if beam is None else beam.width) * sampling.max_tokens


@contextmanager
def refusals_counted(model: str = "") -> Iterator[None]:
    """Count an error in the `with` block as a refused request; `model` is empty if unknown."""
    try:
        yield
    except QuireError as error:
        metrics.REQUESTS_REFUSED.labels(model, error.code.name).inc()
        raise

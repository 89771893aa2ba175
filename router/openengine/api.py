"""The servicers of `openengine.v1`: `Inference` and `Control`."""

import time
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import version
from typing import Final

from contract.errors import InvalidArgumentError, NotFoundError, QuireError, UnimplementedError
from contract.outputs import Event, OutputDelta, OutputFinished, PromptScores, TokenLogprob
from contract.outputs import Usage as TokenCounts
from contract.request import MAX_N
from contract.sampling import MAX_LOGPROBS
from quire.openengine import openengine_pb2 as pb
from quire.openengine import openengine_pb2_grpc
from router.access.tenancy import TENANT_KEY, with_precedence
from router.grpc.call import CallContext, deadline_of, metadata_of
from router.grpc.events import write_events
from router.live.live_request import LiveRequest
from router.openengine.wire import (
    error_to_proto,
    finished_to_proto,
    kv_batch_to_proto,
    metadata_from_call,
    request_from_proto,
    stop_token_ids,
    tokens_to_proto,
    usage_to_proto,
)
from router.request.cells import Cells
from router.schedulers.wire import failure_of
from router.vllm_engine.api import FindDirectory
from router.vllm_engine.kv_events import batches
from rpc.grpc_server import Service, service_of
from rpc.health import Health

_SCHEMA_REVISION: Final = 1
_SCHEMA_RELEASE: Final = "768a93c7b44e40f28c692ad0b471a8f2"
"""The commit of OpenEngine v0.1.0 in the Buf Schema Registry."""
_GUIDES: Final = (
    pb.GUIDED_DECODING_MODE_JSON_SCHEMA,
    pb.GUIDED_DECODING_MODE_REGEX,
    pb.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    pb.GUIDED_DECODING_MODE_CHOICE,
    pb.GUIDED_DECODING_MODE_JSON_OBJECT,
)


class OpenEngineServicer(openengine_pb2_grpc.InferenceServicer):
    """Answers `openengine.v1.Inference`; an interceptor turns errors into statuses."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: CallContext
    ) -> None:
        """Write the messages of the answer to `context`."""
        parsed = replace(request_from_proto(request), deadline=deadline_of(context))
        parsed = with_precedence(parsed, metadata_from_call(metadata_of(context)))
        has_begun = False
        async with await self._cells.generate(parsed) as live:
            answer = _Answer(live, request)

            def messages_of(event: Event) -> Iterator[pb.GenerateResponse]:
                nonlocal has_begun
                for message in answer.messages(event):
                    has_begun = True
                    yield message

            try:
                await write_events(live, context, messages_of)
            except QuireError as error:
                if not has_begun:
                    raise
                failure = error_to_proto(error)
                await context.write(pb.GenerateResponse(request_id=live.request_id, error=failure))


class ControlServicer(openengine_pb2_grpc.ControlServicer):
    """Answers `openengine.v1.Control`; an interceptor turns errors into statuses."""

    def __init__(self, cells: Cells, health: Health, find_directory: FindDirectory) -> None:
        self._cells = cells
        self._health = health
        self._find_directory = find_directory
        self._instance_id = uuid.uuid4().hex

    async def GetServerInfo(  # noqa: N802
        self, _request: pb.GetServerInfoRequest, _: CallContext
    ) -> pb.ServerInfo:
        load = await self._cells.load()
        return pb.ServerInfo(
            engine_name="quire",
            engine_version=version("quire"),
            engine_role=pb.ENGINE_ROLE_AGGREGATED,
            instance_id=self._instance_id,
            supported_models=[model.id for model in self._cells.infos()],
            parallelism=pb.ParallelismInfo(data_parallel_size=1),
            kv_connector=pb.KvConnectorInfo(enabled=False),
            schema_revision=_SCHEMA_REVISION,
            minimum_client_revision=_SCHEMA_REVISION,
            schema_release=_SCHEMA_RELEASE,
            capacity=pb.DeploymentCapacity(
                kv_block_size=load.block_size,
                total_kv_blocks=load.num_blocks,
                max_running_requests=load.max_num_seqs,
            ),
        )

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, _: CallContext
    ) -> pb.ModelInfo:
        if not request.model:
            raise InvalidArgumentError("model", "is not set")
        cell = await self._cells.known(request.model)
        model = cell.model.info(request.model)
        scores = pb.LogprobCapabilities(
            supported=True,
            candidate_selection_modes=[pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
            max_top_n=MAX_LOGPROBS,
        )
        return pb.ModelInfo(
            model_id=str(await self._find_directory(cell.model.directory)),
            served_model_name=model.id,
            max_context_length=model.max_model_len,
            supports_text_input=True,
            supports_token_ids_input=True,
            generation=pb.GenerationCapabilities(
                prompt_logprobs=scores,
                output_logprobs=scores,
                guided_decoding=pb.GuidedDecodingCapabilities(
                    supported=model.structured_output,
                    modes=_GUIDES if model.structured_output else (),
                ),
                max_num_sequences=MAX_N,
                supports_priority=True,
                supports_stop_in_output=True,
                supports_cache_salt=True,
                supports_prefix_cache_bypass=False,
            ),
            supports_lora=False,
            supports_multimodal=False,
        )

    async def GetLoad(  # noqa: N802
        self, request: pb.GetLoadRequest, _: CallContext
    ) -> pb.LoadInfo:
        load = await self._cells.load()
        numbers = {
            "running_requests": load.num_requests_running,
            "queued_requests": load.num_requests_waiting,
            "used_kv_blocks": load.num_blocks - load.num_free_blocks - load.num_cached_blocks,
            "total_kv_blocks": load.num_blocks,
        }
        rank = pb.RankLoadInfo(data_parallel_rank=0, **numbers)
        return pb.LoadInfo(
            instance_id=self._instance_id,
            timestamp_unix_nanos=time.time_ns(),
            ranks=[rank] if request.include_per_rank else [],
            **numbers,
        )

    async def Health(  # noqa: N802
        self, request: pb.HealthRequest, _: CallContext
    ) -> pb.HealthResponse:
        if request.include_inference_probe:
            raise UnimplementedError("include_inference_probe is true; send a request instead")
        state = pb.HEALTH_STATE_READY if self._health.ready else pb.HEALTH_STATE_NOT_READY
        check = pb.HealthCheck(name="scheduler", state=state, message=self._health.status)
        return pb.HealthResponse(state=state, checks=[check])

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: CallContext
    ) -> pb.AbortResponse:
        tenant = self._cells.shared.tenant_of(metadata_of(context).get(TENANT_KEY, ""))
        known = {each.request_id for each in self._cells.admitted if each.tenant == tenant}
        match request.WhichOneof("target"):
            case "request_id":
                if request.request_id not in known:
                    raise NotFoundError(f"no live request {request.request_id[:128]!r} is here")
                self._cells.abort([request.request_id], tenant)
            case "all_requests":
                self._cells.abort(known, tenant)
            case "kv_session":
                raise UnimplementedError("kv_session is set; it is not supported")
            case _:
                raise InvalidArgumentError("target", "is not set")
        return pb.AbortResponse(status=pb.ABORT_STATUS_ABORTED)

    async def GetKvEventSources(  # noqa: N802
        self, _request: pb.GetKvEventSourcesRequest, _: CallContext
    ) -> pb.GetKvEventSourcesResponse:
        return pb.GetKvEventSourcesResponse()

    async def SubscribeKvEvents(  # noqa: N802
        self, request: pb.SubscribeKvEventsRequest, context: CallContext
    ) -> None:
        if any(request.data_parallel_ranks):
            ranks = list(request.data_parallel_ranks[:8])
            raise InvalidArgumentError("data_parallel_ranks", f"is {ranks}; a cell has only rank 0")
        has_begun = False
        try:
            async with aclosing(batches(self._cells.watch_kv())) as found:
                async for batch in found:
                    has_begun = True
                    message = pb.SubscribeKvEventsResponse(batch=kv_batch_to_proto(batch))
                    await context.write(message)
        except QuireError as error:
            if not has_begun:
                raise
            await context.write(pb.SubscribeKvEventsResponse(error=error_to_proto(error)))


def openengine_services(
    cells: Cells, health: Health, find_directory: FindDirectory
) -> tuple[Service, ...]:
    """Make the services to pass to `rpc.server.serve`."""
    control = ControlServicer(cells, health, find_directory)
    return (
        service_of(pb, openengine_pb2_grpc, "Inference", OpenEngineServicer(cells)),
        service_of(pb, openengine_pb2_grpc, "Control", control),
    )


class _Answer:
    """Makes the messages that answer one request.

    The end of each output is held back until the next event, because the last output's end must
    contain the usage. A stop token is held back until the next event shows whether the output ends
    with it. If the output ends with it, the token is dropped, unless the request has
    `include_stop_in_output`.
    """

    def __init__(self, live: LiveRequest, request: pb.GenerateRequest) -> None:
        self._live = live
        self._stop_token_ids = frozenset(stop_token_ids(request))
        self._withholds = not request.stopping.include_stop_in_output
        self._withheld: dict[int, tuple[int, TokenLogprob | None]] = {}
        """Maps an output's index to its held-back token and the token's log-probabilities."""
        self._end: pb.GenerateResponse | None = None
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        """The prompt's log-probabilities so far, one for each token; None for the first token."""

    def messages(self, event: Event) -> Iterator[pb.GenerateResponse]:
        """Yield the messages for an event; raises the failure of an output."""
        if self._end is not None:
            if isinstance(event, TokenCounts):
                self._end.usage.CopyFrom(usage_to_proto(event))
            yield self._end
            self._end = None
        match event:
            case PromptScores():
                self._prompt_logprobs += event.logprobs
                if not event.has_more:  # the protocol has one message for the whole prompt
                    prompt = self._live.prompt_token_ids
                    tokens = tokens_to_proto(prompt, self._prompt_logprobs)
                    yield self._response(prompt=pb.PromptOutput(tokens=tokens))
            case OutputDelta():
                if (token := self._delta(event)) is not None:
                    yield self._response(token=token)
            case OutputFinished():
                if (failure := failure_of(event)) is not None:
                    raise failure
                index = event.output_index
                held = self._withheld.pop(index, None)
                if held is not None and held[0] != event.stop_token_id:
                    tokens = tokens_to_proto([held[0]], [held[1]])
                    yield self._response(token=pb.TokenOutput(output_index=index, tokens=tokens))
                output = self._live.outputs[index]
                end_token_id = output.token_ids[-1] if output.has_end_token else None
                end = finished_to_proto(event, end_token_id)
                self._end = self._response(finished=end)

    def _delta(self, delta: OutputDelta) -> pb.TokenOutput | None:
        index = delta.output_index
        token_ids, logprobs = (
            [*delta.token_ids],
            [*(delta.logprobs or [None] * len(delta.token_ids))],
        )
        if (held := self._withheld.pop(index, None)) is not None:
            token_ids.insert(0, held[0])
            logprobs.insert(0, held[1])
        if self._withholds and token_ids and token_ids[-1] in self._stop_token_ids:
            self._withheld[index] = token_ids.pop(), logprobs.pop()
        if not token_ids and not delta.text:
            return None
        tokens = tokens_to_proto(token_ids, logprobs)
        return pb.TokenOutput(output_index=index, tokens=tokens, text=delta.text)

    def _response(
        self,
        *,
        prompt: pb.PromptOutput | None = None,
        token: pb.TokenOutput | None = None,
        finished: pb.GenerationFinished | None = None,
    ) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            request_id=self._live.request_id, prompt=prompt, token=token, finished=finished
        )

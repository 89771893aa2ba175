"""The servicer of `vllm.grpc.engine.VllmEngine`."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from contract.errors import InvalidArgumentError
from contract.outputs import Event, OutputDelta, OutputFinished, PromptScores, TokenLogprob
from contract.request import GenerateRequest, Model
from quire.vllm_engine import smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from quire.vllm_engine import vllm_engine_pb2 as pb
from router.access.tenancy import with_precedence
from router.grpc.call import CallContext, deadline_of, metadata_of
from router.grpc.events import write_events
from router.live.live_request import LiveRequest
from router.request.cells import Cells
from router.request.vectors import make_vectors, pooling_of
from router.schedulers.wire import failure_of
from router.vllm_engine.kv_events import batches
from router.vllm_engine.tokenizer_files import chunks_to_proto, read_tokenizer_files
from router.vllm_engine.wire import (
    complete_to_proto,
    input_logprobs_to_proto,
    output_logprobs_to_proto,
    request_from_proto,
)
from rpc.grpc_server import Service, service_of
from rpc.health import Health

FindDirectory = Callable[[str], Awaitable[Path]]
"""Returns the path of a model's directory, given its `ServedModel.directory`."""


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers `vllm.grpc.engine.VllmEngine`; an interceptor turns errors into statuses."""

    def __init__(self, cells: Cells, health: Health, find_directory: FindDirectory) -> None:
        self._cells = cells
        (self._cell,) = cells.all  # requests of this API name no model
        self._health = health
        self._find_directory = find_directory
        self._started_s = time.monotonic()

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: CallContext
    ) -> None:
        """Stream the deltas and the end of each output, like `InferenceServicer.Generate`."""
        parsed = replace(request_from_proto(request), deadline=deadline_of(context))
        parsed = with_precedence(parsed, metadata_of(context))
        async with await self._cell.generate(parsed) as live:
            answer = _Answer(live, is_streamed=request.stream)
            await write_events(live, context, answer.messages)

    async def Embed(  # noqa: N802
        self, request: pb.EmbedRequest, context: CallContext
    ) -> pb.EmbedResponse:
        model = self._cell.model.info()
        prompt = GenerateRequest(
            prompt=tuple(request.tokenized.input_ids), deadline=deadline_of(context)
        )
        prompt = with_precedence(prompt, metadata_of(context))
        (vector,) = await make_vectors(
            self._cell, [prompt], pooling_of(model), lambda _: "tokenized.input_ids"
        )
        return pb.EmbedResponse(
            embedding=vector.values,
            prompt_tokens=vector.num_tokens,
            embedding_dim=len(vector.values),
        )

    async def HealthCheck(  # noqa: N802
        self, _request: pb.HealthCheckRequest, _: CallContext
    ) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=self._health.ready, message=self._health.status)

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, _: CallContext
    ) -> pb.AbortResponse:
        self._cells.abort(request.request_ids)
        return pb.AbortResponse()

    async def GetModelInfo(  # noqa: N802
        self, _request: pb.GetModelInfoRequest, _: CallContext
    ) -> pb.GetModelInfoResponse:
        model = self._cell.model.info()
        directory = await self._find_directory(self._cell.model.directory)
        return _model_to_proto(model, directory, await asyncio.to_thread(_read_config, directory))

    async def GetServerInfo(  # noqa: N802
        self, _request: pb.GetServerInfoRequest, _: CallContext
    ) -> pb.GetServerInfoResponse:
        load = await self._cells.load()
        return pb.GetServerInfoResponse(
            active_requests=self._cells.num_live,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="quire",
            data_parallel_size=1,
            block_size=load.block_size,
            max_num_seqs=load.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(  # noqa: N802
        self, request: pb.GetLoadsRequest, _: CallContext
    ) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidArgumentError("dp_rank", f"is {request.dp_rank}; a cell has only rank 0")
        load = await self._cells.load()
        running, waiting = load.num_requests_running, load.num_requests_waiting
        num_held = load.num_blocks - load.num_free_blocks - load.num_cached_blocks
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("quire"),
            dp_rank_count=1,
            loads=[
                pb.SchedulerLoad(
                    num_running_reqs=running,
                    num_waiting_reqs=waiting,
                    num_total_reqs=running + waiting,
                    num_used_tokens=num_held * load.block_size,
                    max_total_num_tokens=load.num_blocks * load.block_size,
                    token_usage=num_held / max(1, load.num_blocks),
                    cache_hit_rate=load.num_prefix_cache_hits
                    / max(1, load.num_prefix_cache_queries),
                    utilization=running / max(1, load.max_num_seqs),
                    max_running_requests=load.max_num_seqs,
                )
            ],
        )

    async def GetTokenizer(  # noqa: N802
        self, _request: smg_common_pb2.GetTokenizerRequest, context: CallContext
    ) -> None:
        directory = await self._find_directory(self._cell.model.directory)
        archive = await asyncio.to_thread(read_tokenizer_files, directory)
        for chunk in chunks_to_proto(archive):
            await context.write(chunk)

    async def SubscribeKvEvents(  # noqa: N802
        self, _request: smg_common_pb2.SubscribeKvEventsRequest, context: CallContext
    ) -> None:
        async with aclosing(batches(self._cells.watch_kv())) as found:
            async for batch in found:
                await context.write(batch)


def vllm_engine_service(cells: Cells, health: Health, find_directory: FindDirectory) -> Service:
    """Make the `Service` to pass to `rpc.server.serve`."""
    servicer = VllmEngineServicer(cells, health, find_directory)
    return service_of(vllm_engine_pb2, vllm_engine_pb2_grpc, "VllmEngine", servicer)


class _Answer:
    """Makes the messages that answer one request."""

    def __init__(self, live: LiveRequest, *, is_streamed: bool) -> None:
        self._live = live
        self._is_streamed = is_streamed
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._parts: list[list[OutputDelta]] = [[] for _ in live.outputs]
        self._has_begun = [False] * len(live.outputs)

    def messages(self, event: Event) -> Iterator[pb.GenerateResponse]:
        """Yield the message for an event, if there is one. Raises the error of a failed output."""
        match event:
            case PromptScores():
                self._prompt_logprobs = [*(self._prompt_logprobs or []), *event.logprobs]
            case OutputDelta() if self._is_streamed:
                chunk = self._chunk(event.output_index, event.token_ids, event.logprobs)
                yield pb.GenerateResponse(chunk=chunk)
            case OutputDelta():  # the message of the output's end will include it
                self._parts[event.output_index].append(event)
            case OutputFinished():
                if (failure := failure_of(event)) is not None:
                    raise failure
                yield pb.GenerateResponse(complete=self._end(event))

    def _end(self, finished: OutputFinished) -> pb.GenerateComplete:
        parts = self._parts[finished.output_index]
        token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
        logprobs = tuple(each for part in parts for each in part.logprobs)
        return complete_to_proto(finished, self._chunk(finished.output_index, token_ids, logprobs))

    def _chunk(
        self, index: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> pb.GenerateStreamChunk:
        prompt = self._live.prompt_token_ids
        chunk = pb.GenerateStreamChunk(
            token_ids=token_ids,
            prompt_tokens=len(prompt),
            completion_tokens=len(token_ids),
            cached_tokens=self._live.num_cached_tokens or 0,
            output_logprobs=output_logprobs_to_proto(token_ids, logprobs),
            index=index,
        )
        if self._prompt_logprobs is not None and not self._has_begun[index]:
            chunk.input_logprobs.CopyFrom(input_logprobs_to_proto(prompt, self._prompt_logprobs))
        self._has_begun[index] = True
        return chunk


def _read_config(directory: Path) -> dict[str, object]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return {}
    return config if isinstance(config, dict) else {}


def _model_to_proto(
    model: Model, directory: Path, config: dict[str, object]
) -> pb.GetModelInfoResponse:
    architectures = config.get("architectures")
    return pb.GetModelInfoResponse(
        model_path=model.id,
        is_generation=model.abilities.generates,
        max_context_length=model.max_model_len,
        vocab_size=model.vocab_size,
        served_model_name=model.id,
        tokenizer_path=str(directory),
        model_type=str(config.get("model_type", "")),
        architectures=map(str, architectures) if isinstance(architectures, list) else (),
        eos_token_ids=model.eos_token_ids,
        max_req_input_len=model.max_prompt_len,
    )

"""The gRPC API: `quire.v1.InferenceService`."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

from contract.codec.outputs import (
    event_to_proto,
    finished_to_proto,
    logprob_to_proto,
    usage_to_proto,
    write_delta,
)
from contract.codec.request import (
    embed_requests_from_proto,
    embedding_kind_from_proto,
    generate_request_from_proto,
    model_to_proto,
    resume_request_from_proto,
)
from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import Event, FinishReason, OutputDelta, OutputFinished, PromptScores, Usage
from contract.request import MAX_STREAM_INTERVAL, GenerateRequest
from quire.v1 import inference_pb2, inference_pb2_grpc
from router.access.tenancy import TENANT_KEY, with_precedence
from router.grpc.bounds import RefusedRequest
from router.grpc.call import CallContext, deadline_of, metadata_of
from router.grpc.events import write_events
from router.grpc.many import ManyCall
from router.live.live_request import LiveRequest
from router.request.cells import Cells
from router.request.vectors import check_inputs, make_vectors, pooling_of
from router.schedulers.wire import failure_of
from rpc.grpc_server import Service, service_of


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers clients' calls; the server's interceptor turns errors into statuses."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    async def Generate(  # noqa: N802
        self,
        request: inference_pb2.GenerateRequest,
        context: CallContext,
    ) -> None:
        """Stream the events; a slow reader gets fewer and larger deltas.

        The events are written to the context, not yielded, because grpcio does not cancel a
        generator while an event that it has yielded is being written. This method waits for each
        write itself, so if the call ends during a write, the method is cancelled at once, and so is
        the request.
        """
        await _stream(await self._cells.generate(_request(request, context)), context)

    async def GenerateMany(  # noqa: N802
        self,
        requests: AsyncIterator[inference_pb2.GenerateManyRequest | RefusedRequest],
        context: CallContext,
    ) -> None:
        """Serve many requests on one call, which takes fewer writes than one call per request."""
        await ManyCall(self._cells, context).serve(requests)

    async def Resume(  # noqa: N802
        self, request: inference_pb2.ResumeRequest, context: CallContext
    ) -> None:
        """Resume a request: stream the events after those that the client has received."""
        tenant = metadata_of(context).get(TENANT_KEY, "")
        resume = resume_request_from_proto(request, tenant, deadline_of(context))
        await _stream(await self._cells.resume(resume, request.model), context)

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: CallContext
    ) -> inference_pb2.CancelResponse:
        """Cancel a resumable request by its id, even if the client has lost its stream."""
        tenant = metadata_of(context).get(TENANT_KEY, "")
        await self._cells.cancel(request.request_id, tenant, request.model)
        return inference_pb2.CancelResponse()

    async def GenerateOnce(  # noqa: N802
        self,
        request: inference_pb2.GenerateOnceRequest,
        context: CallContext,
    ) -> inference_pb2.GenerateOnceResponse:
        """Return all outputs in one message; if any output fails, the call fails."""
        domain_request = _request(request.request, context)
        if domain_request.stream_interval is not None:
            raise InvalidArgumentError(
                "stream_interval",
                f"is {domain_request.stream_interval}; GenerateOnce does not stream",
            )
        if not domain_request.resumable:  # `Resume` may stream a resumable request
            domain_request = replace(domain_request, stream_interval=MAX_STREAM_INTERVAL)
        response = inference_pb2.GenerateOnceResponse()
        async with await self._cells.generate(domain_request) as live:
            response.request_id = live.request_id
            for _ in range(domain_request.n):
                response.outputs.add()
            texts: list[list[str]] = [[] for _ in response.outputs]
            async for event in live:
                match event:
                    case OutputDelta():
                        output = response.outputs[event.output_index]
                        output.token_ids.extend(event.token_ids)
                        output.logprobs.extend(map(logprob_to_proto, event.logprobs))
                        texts[event.output_index].append(event.text)
                    case OutputFinished():
                        if (error := failure_of(event)) is not None:
                            raise error
                        output = response.outputs[event.output_index]
                        output.finished.CopyFrom(finished_to_proto(event))
                        output.text = "".join(texts[event.output_index])
                    case PromptScores():
                        response.prompt.SetInParent()
                        response.prompt.logprobs.extend(map(logprob_to_proto, event.logprobs))
                    case Usage():
                        response.usage.CopyFrom(usage_to_proto(event))
        return response

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: CallContext
    ) -> inference_pb2.EmbedResponse:
        """Return the embeddings of all inputs; if any input fails, the call fails."""
        inference = await self._cells.use(request.model)
        model = inference.model.info(request.model)
        dimensions = request.dimensions if request.HasField("dimensions") else None
        check_inputs("inputs", len(request.inputs), model, dimensions)
        requests = embed_requests_from_proto(request)
        deadline, metadata = deadline_of(context), metadata_of(context)
        vectors = await make_vectors(
            inference,
            [with_precedence(replace(each, deadline=deadline), metadata) for each in requests],
            pooling_of(
                model,
                embedding_kind_from_proto(request.pooling),
                normalize=request.normalize if request.HasField("normalize") else None,
                dimensions=dimensions,
            ),
            "inputs[{}]".format,
        )
        return inference_pb2.EmbedResponse(
            request_id=request.request_id or uuid.uuid4().hex,
            embeddings=[inference_pb2.Embedding(values=each.values) for each in vectors],
            usage=inference_pb2.Usage(prompt_tokens=sum(each.num_tokens for each in vectors)),
        )

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, _: CallContext
    ) -> inference_pb2.TokenizeResponse:
        inference = await self._cells.known(request.model)
        max_model_len = inference.model.info(request.model).max_model_len
        has_special = request.HasField("add_special_tokens")
        match request.WhichOneof("input"):
            case "text":
                token_ids = await inference.text.tokenize(
                    request.model,
                    request.text,
                    add_special_tokens=request.add_special_tokens if has_special else True,
                )
            case "chat":
                if has_special:
                    raise InvalidArgumentError(
                        "add_special_tokens",
                        "is set; with chat it must be unset, because the template adds them",
                    )
                if not request.chat.messages:
                    raise InvalidArgumentError("chat.messages", "is empty; it needs a message")
                token_ids = await inference.text.tokenize_chat(
                    request.model,
                    [{"role": m.role, "content": m.content} for m in request.chat.messages],
                )
            case _:
                raise InvalidArgumentError("input", "is not set; text or chat must be set")
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, _: CallContext
    ) -> inference_pb2.DetokenizeResponse:
        inference = await self._cells.known(request.model)
        text = await inference.text.detokenize(
            request.model,
            request.token_ids,
            skip_special_tokens=(
                request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            ),
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self, _request: inference_pb2.ListModelsRequest, _: CallContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=map(model_to_proto, self._cells.infos()))

    async def GetLoad(  # noqa: N802
        self, request: inference_pb2.GetLoadRequest, _: CallContext
    ) -> inference_pb2.GetLoadResponse:
        return inference_pb2.GetLoadResponse(load=await self._cells.load(request.model))

    async def DescribeKv(  # noqa: N802
        self, request: inference_pb2.DescribeKvRequest, _: CallContext
    ) -> inference_pb2.DescribeKvResponse:
        workers = await self._cells.describe_kv(request.query)
        return inference_pb2.DescribeKvResponse(workers=workers)

    async def DescribeActivity(  # noqa: N802
        self, request: inference_pb2.DescribeActivityRequest, _: CallContext
    ) -> inference_pb2.DescribeActivityResponse:
        workers = await self._cells.describe_activity(request.query)
        return inference_pb2.DescribeActivityResponse(workers=workers)


def inference_service(cells: Cells) -> Service:
    """Make the `Service` to pass to `rpc.server.serve`."""
    return service_of(
        inference_pb2, inference_pb2_grpc, "InferenceService", InferenceServicer(cells)
    )


def _request(message: inference_pb2.GenerateRequest, context: CallContext) -> GenerateRequest:
    """Make a request from the message and the call's metadata."""
    request = replace(generate_request_from_proto(message), deadline=deadline_of(context))
    return with_precedence(request, metadata_of(context))


async def _stream(live: LiveRequest, context: CallContext) -> None:
    expired: QuireError | None = None
    response = inference_pb2.GenerateResponse(request_id=live.request_id)

    def messages_of(event: Event) -> tuple[inference_pb2.GenerateResponse]:
        nonlocal expired
        if isinstance(event, OutputDelta):  # nearly all events are deltas; they share one message
            response.delta.Clear()
            write_delta(event, response.delta)
            return (response,)
        if isinstance(event, OutputFinished) and event.finish_reason is FinishReason.DEADLINE:
            expired = failure_of(event)
        return (event_to_proto(live.request_id, event),)

    async with live:
        await write_events(live, context, messages_of)
    if expired is not None:  # the client's own clock would raise this error a moment later
        raise expired

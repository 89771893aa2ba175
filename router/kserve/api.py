"""The servicer of `inference.GRPCInferenceService`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Final

from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import Event, OutputDelta, OutputFinished, Usage
from quire.kserve import open_inference_pb2, open_inference_pb2_grpc
from router.access.tenancy import with_precedence
from router.grpc.call import CallContext, deadline_of, metadata_of
from router.grpc.events import write_events
from router.http.errors import error_with_json_names
from router.kserve.wire import (
    FINAL_PARAMETER,
    Answer,
    InferCall,
    answer_to_proto,
    check_version,
    empty_response,
    infer_call_from_proto,
    model_to_proto,
)
from router.live.live_request import LiveRequest
from router.request.cells import Cells
from router.schedulers.wire import failure_of
from rpc.grpc_server import Service, service_of

MAX_STREAMED_REQUESTS: Final = 1024
"""Maximum number of unanswered requests of one stream; a further request starts only after one of
these has been answered."""


class KServeServicer(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers `inference.GRPCInferenceService`; an interceptor turns errors into statuses."""

    def __init__(self, cells: Cells, is_ready: Callable[[], bool]) -> None:
        self._cells = cells
        self._is_ready = is_ready

    async def ServerLive(  # noqa: N802
        self, _request: open_inference_pb2.ServerLiveRequest, _: CallContext
    ) -> open_inference_pb2.ServerLiveResponse:
        return open_inference_pb2.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, _request: open_inference_pb2.ServerReadyRequest, _: CallContext
    ) -> open_inference_pb2.ServerReadyResponse:
        return open_inference_pb2.ServerReadyResponse(ready=self._is_ready())

    async def ModelReady(  # noqa: N802
        self, request: open_inference_pb2.ModelReadyRequest, _: CallContext
    ) -> open_inference_pb2.ModelReadyResponse:
        """Return whether the process and the model's schedulers are ready."""
        check_version(request.version)
        cell = self._cells.of(request.name)
        cell.model.check_name(request.name)
        is_ready = self._is_ready() and cell.schedulers.is_ready
        return open_inference_pb2.ModelReadyResponse(ready=is_ready)

    async def ServerMetadata(  # noqa: N802
        self, _request: open_inference_pb2.ServerMetadataRequest, _: CallContext
    ) -> open_inference_pb2.ServerMetadataResponse:
        return open_inference_pb2.ServerMetadataResponse(name="quire", version=version("quire"))

    async def ModelMetadata(  # noqa: N802
        self, request: open_inference_pb2.ModelMetadataRequest, _: CallContext
    ) -> open_inference_pb2.ModelMetadataResponse:
        """Describe the model's input and output tensors."""
        check_version(request.version)
        return model_to_proto(self._cells.of(request.name).model.info(request.name))

    async def ModelInfer(  # noqa: N802
        self, request: open_inference_pb2.ModelInferRequest, context: CallContext
    ) -> open_inference_pb2.ModelInferResponse:
        """Return the complete outputs of a request."""
        call = self._parse(request, context)
        if call.stream:
            raise InvalidArgumentError("stream", "is true; use ModelStreamInfer for streams")
        async with await self._generate(call) as live:
            return answer_to_proto(call, await _complete(call, live))

    async def ModelStreamInfer(  # noqa: N802
        self,
        requests: AsyncIterator[open_inference_pb2.ModelInferRequest],
        context: CallContext,
    ) -> None:
        """Serve the requests of the stream concurrently, each in a separate task."""
        room = asyncio.Semaphore(MAX_STREAMED_REQUESTS)
        writing = asyncio.Lock()  # gRPC allows one write at a time

        async def write(response: open_inference_pb2.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(response)

        async def serve(request: open_inference_pb2.ModelInferRequest) -> None:
            try:
                await self._serve_streamed(request, context, write)
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    tasks.create_task(serve(request))
        except ExceptionGroup as errors:  # for example from an invalid message
            raise errors.exceptions[0] from None

    async def _serve_streamed(
        self,
        request: open_inference_pb2.ModelInferRequest,
        context: CallContext,
        write: Callable[[open_inference_pb2.ModelStreamInferResponse], Awaitable[None]],
    ) -> None:
        """Write the responses to one request of a stream; an error is the last response."""
        try:
            call = self._parse(request, context)
            async with await self._generate(call) as live:
                if call.stream:
                    await write_events(live, context, _Stream(call, live).responses, write)
                else:
                    await write(_response(call, await _complete(call, live), final=True))
        except QuireError as error:
            response = empty_response(request.model_name, request.id)
            response.parameters[FINAL_PARAMETER].bool_param = True
            await write(
                open_inference_pb2.ModelStreamInferResponse(
                    error_message=str(error), infer_response=response
                )
            )

    def _parse(
        self, message: open_inference_pb2.ModelInferRequest, context: CallContext
    ) -> InferCall:
        """Make an `InferCall` from the message and the gRPC call's metadata."""
        call = infer_call_from_proto(message)
        deadline = deadline_of(context)
        if call.timeout_s is not None:
            timeout = asyncio.get_running_loop().time() + call.timeout_s
            deadline = timeout if deadline is None else min(deadline, timeout)
        request = replace(call.request, model=call.model_name, deadline=deadline)
        return replace(call, request=with_precedence(request, metadata_of(context)))

    async def _generate(self, call: InferCall) -> LiveRequest:
        try:
            return await self._cells.generate(call.request)
        except InvalidArgumentError as error:
            raise error_with_json_names({"prompt": "text_input"}, error) from None


def kserve_service(cells: Cells, is_ready: Callable[[], bool]) -> Service:
    """Make the `Service` to pass to `rpc.server.serve`."""
    return service_of(
        open_inference_pb2,
        open_inference_pb2_grpc,
        "GRPCInferenceService",
        KServeServicer(cells, is_ready),
    )


async def _complete(call: InferCall, live: LiveRequest) -> Answer:
    """Collect all outputs; raise the error of an output that failed."""
    texts = [[call.prefix] for _ in live.outputs]
    reasons = [""] * len(texts)
    async for event in live:
        match event:
            case OutputDelta():
                texts[event.output_index].append(event.text)
            case OutputFinished():
                reasons[event.output_index] = _reason(event)
    return Answer(
        texts=tuple(map("".join, texts)),
        finish_reasons=tuple(reasons),
        num_input_tokens=len(live.prompt_token_ids),
        num_output_tokens=tuple(len(output.token_ids) for output in live.outputs),
    )


class _Stream:
    """The responses to a streamed request.

    Each delta becomes an answer in which the other outputs have no text. When the router sends a
    delta, it does not know yet whether another delta follows. So no delta is marked as the final
    answer: the final answer is an extra one, without text, after the last delta.
    """

    def __init__(self, call: InferCall, live: LiveRequest) -> None:
        self._call = call
        self._nothing = Answer(
            texts=("",) * len(live.outputs),
            finish_reasons=("",) * len(live.outputs),
            num_input_tokens=len(live.prompt_token_ids),
            num_output_tokens=(0,) * len(live.outputs),
        )
        self._reasons = [""] * len(live.outputs)

    def responses(self, event: Event) -> Iterator[open_inference_pb2.ModelStreamInferResponse]:
        """Yield the response for an event, if there is one; raises the failure of an output."""
        nothing = self._nothing
        match event:
            case OutputDelta():
                texts, counts = list(nothing.texts), list(nothing.num_output_tokens)
                texts[event.output_index] = event.text
                counts[event.output_index] = len(event.token_ids)
                answer = replace(nothing, texts=tuple(texts), num_output_tokens=tuple(counts))
                yield _response(self._call, answer, final=False)
            case OutputFinished():
                self._reasons[event.output_index] = _reason(event)
            case Usage():
                answer = replace(nothing, finish_reasons=tuple(self._reasons))
                yield _response(self._call, answer, final=True)


def _response(
    call: InferCall, answer: Answer, *, final: bool
) -> open_inference_pb2.ModelStreamInferResponse:
    response = answer_to_proto(call, answer, final=final)
    return open_inference_pb2.ModelStreamInferResponse(infer_response=response)


def _reason(finished: OutputFinished) -> str:
    if (failure := failure_of(finished)) is not None:
        raise failure
    return finished.finish_reason.value

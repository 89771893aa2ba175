"""An InferenceService that answers from a script and records its requests."""
# ruff: noqa: N802, ARG002 - gRPC chooses names and arguments

import asyncio
from dataclasses import dataclass, field
from typing import Any

from contract.codec.packing import pack_int32
from contract.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    TooBusyError,
    UnavailableError,
)
from quire.v1 import common_pb2, inference_pb2, kv_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceServicer


@dataclass
class FakeInference(InferenceServiceServicer):
    """Answers "one two" to every prompt; its answer to the prompt "endless" never ends.

    To the prompt "pauses" it answers "one", and the rest after `goes_on` is set.
    """

    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    """Metadata of the calls that generate."""
    num_activity_calls: int = 0
    is_for_tenants: bool = False
    """Whether the caller is a tenant, who may not see other tenants' requests."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    retry_after_s: float = 2.5
    """The delay in the answer to "busy"."""

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.text == "bad":
            raise InvalidArgumentError("sampling.top_p", "is 2; it must be in (0, 1]")
        if request.text == "busy":
            raise TooBusyError("the queue is full", retry_after_s=self.retry_after_s)
        try:
            for index, word in enumerate(("one", " two")):
                delta = inference_pb2.OutputDelta(token_offset=index, token_ids=[index], text=word)
                if request.sampling.HasField("logprobs"):
                    delta.logprobs.add(logprob=-0.5, top_token_ids=[index], top_logprobs=[-0.5])
                yield inference_pb2.GenerateResponse(request_id="r", delta=delta)
                if request.text == "breaks":
                    raise UnavailableError("the router is shutting down")
                if request.text == "pauses":
                    await self.goes_on.wait()
            if request.text == "endless":
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):  # while sending, or while waiting
            self.cancelled.set()
            raise
        finished = inference_pb2.OutputFinished(finish_reason=common_pb2.FINISH_REASON_LENGTH)
        if request.text == "fails":
            finished.finish_reason = common_pb2.FINISH_REASON_ERROR
            finished.error.MergeFrom(
                common_pb2.OutputError(code=14, message="lost", retryable=True)
            )
        yield inference_pb2.GenerateResponse(request_id="r", finished=finished)
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
        yield inference_pb2.GenerateResponse(request_id="r", usage=usage)

    async def Resume(self, request, context):
        self.requests.append(request)
        if not request.received:  # the router knows no client that has received nothing
            raise NotFoundError(f"request {request.request_id!r} cannot be resumed")
        delta = inference_pb2.OutputDelta(token_offset=1, token_ids=[1], text=" two")
        yield inference_pb2.GenerateResponse(request_id="r", delta=delta)
        finished = inference_pb2.OutputFinished(finish_reason=common_pb2.FINISH_REASON_LENGTH)
        yield inference_pb2.GenerateResponse(request_id="r", finished=finished)
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
        yield inference_pb2.GenerateResponse(request_id="r", usage=usage)

    async def Cancel(self, request, context):
        self.requests.append(request)
        return inference_pb2.CancelResponse()

    async def GenerateOnce(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        finished = inference_pb2.OutputFinished(
            finish_reason=common_pb2.FINISH_REASON_STOP, stop_string="!"
        )
        output = inference_pb2.Output(text="one", token_ids=[1], finished=finished)
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=1)
        return inference_pb2.GenerateOnceResponse(request_id="r", outputs=[output], usage=usage)

    async def Tokenize(self, request, context):
        self.requests.append(request)
        return inference_pb2.TokenizeResponse(token_ids=[5, 6, 7], max_model_len=64)

    async def Detokenize(self, request, context):
        self.requests.append(request)
        return inference_pb2.DetokenizeResponse(text="five six")

    async def ListModels(self, request, context):
        model = common_pb2.ModelInfo(id="m", max_model_len=64, vocab_size=9, eos_token_ids=[1])
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetLoad(self, request, context):
        load = common_pb2.Load(
            num_requests_running=2,
            num_blocks=10,
            num_workers=1,
            num_host_blocks=4,
            num_cached_host_blocks=2,
            num_pinned_blocks=3,
            num_prefix_cache_queries=8,
            num_prefix_cache_hits=2,
            fragmentation=0.25,
            num_slots_held=160,
            num_slots_written=120,
        )
        return inference_pb2.GetLoadResponse(load=load)

    async def DescribeActivity(self, request, context):
        """Returns ten more steps at each call."""
        self.requests.append(request)
        self.num_activity_calls += 1
        if self.is_for_tenants:
            raise PermissionDeniedError("this call is for operators")
        steps = [
            common_pb2.StepRecord(step_id=i, execute_s=0.002 * i, num_decode_tokens=4)
            for i in range(1, 4)
        ]
        worker = common_pb2.WorkerActivity(
            worker="unix:/run/w.sock",
            attached_at_s=100.0,
            load=common_pb2.Load(num_requests_running=2, fragmentation=0.25),
            num_steps=10 * self.num_activity_calls,
            num_decode_tokens=40 * self.num_activity_calls,
            num_preemptions=3,
            steps=steps,
        )
        return inference_pb2.DescribeActivityResponse(workers=[worker])

    async def DescribeKv(self, request, context):
        self.requests.append(request)
        tier = kv_pb2.TierKv(
            tier=kv_pb2.KV_TIER_DEVICE,
            num_blocks=7,
            num_held=1,
            num_shared=1,
            num_cached=1,
            num_pinned=1,
            num_free=1,
            num_retired=2,
            states=bytes([1, 2, 3, 4, 5, 6, 6]),
            ref_counts=pack_int32([0, 0, 0, 1, 2, 0, 0]) if request.query.ref_counts else b"",
        )
        sequence = kv_pb2.SequenceKv(
            seq_id=3,
            request_id="r[1]",
            status=kv_pb2.SEQUENCE_STATUS_DECODE,
            num_tokens=9,
            num_device_blocks=2,
            device_block_ids=pack_int32([3, 4]) if request.query.block_tables else b"",
        )
        worker = kv_pb2.WorkerKv(
            worker="unix:/w",
            block_size=4,
            block_bytes=64,
            tiers=[tier],
            sequences=[sequence],
            num_sequences=2,
            next_seq_id=8,
        )
        return inference_pb2.DescribeKvResponse(workers=[worker])

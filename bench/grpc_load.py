"""Loads a Quire router over gRPC with streams of random tokens, and measures its throughput.

The same closed loop as `load.py`, which speaks HTTP: each of `concurrency` slots sends its next
prompt when its last one is complete.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence

from load import Workload

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.peers.channel import open_channel


def draw_prompts(workload: Workload) -> list[list[int]]:
    """The workload's prompts, different for each seed, and from those that `load.py` draws."""
    draw = random.Random(f"prompts {workload.seed}")
    return [
        [draw.randrange(workload.vocab_size) for _ in range(workload.input_len)]
        for _ in range(workload.num_prompts)
    ]


def sampling_of(workload: Workload) -> common_pb2.SamplingParams:
    """Greedy, to the full length."""
    return common_pb2.SamplingParams(
        temperature=0, seed=0, max_tokens=workload.output_len, ignore_eos=True
    )


async def output_tok_s(target: str, workload: Workload, concurrency: int) -> float:
    """Send all, and give the tokens per second; raises RuntimeError if an answer is not whole."""
    requests = [
        inference_pb2.GenerateRequest(
            model=workload.model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=sampling_of(workload),
        )
        for prompt in draw_prompts(workload)
    ]
    async with open_channel(target) as channel:
        stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        await stub.ListModels(inference_pb2.ListModelsRequest())  # connects
        started = time.perf_counter()
        num_tokens = await _send_all(stub, requests, concurrency)
        duration_s = time.perf_counter() - started
    if num_tokens != workload.num_prompts * workload.output_len:
        raise RuntimeError(f"{num_tokens} tokens came for {workload}")
    return num_tokens / duration_s


async def _send_all(
    stub: InferenceServiceStub,
    requests: Sequence[inference_pb2.GenerateRequest],
    concurrency: int,
) -> int:
    num_tokens = 0
    remaining = iter(requests)

    async def slot(remaining: Iterator[inference_pb2.GenerateRequest]) -> None:
        nonlocal num_tokens
        for request in remaining:  # shared by the slots: each takes the next one
            async for response in stub.Generate(request):
                num_tokens += len(response.delta.token_ids)  # none in an end

    async with asyncio.TaskGroup() as slots:
        for _ in range(concurrency):
            slots.create_task(slot(remaining))
    return num_tokens

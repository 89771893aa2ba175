"""In each format of numbers and KV, a preempted and recomputed sequence draws the same tokens."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.up.layout import SHIPPED_MODEL
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import generate_request, read_aio
from tests.e2e.service import Service

NUM_STREAMS = 24
NUM_TOKENS = 120
BLOCK_SIZE = 16


def prompts() -> list[list[int]]:
    draw = random.Random(17)
    return [
        [draw.randrange(5, 500) for _ in range(draw.randrange(8, 60))] for _ in range(NUM_STREAMS)
    ]


async def generate(service: Service, *, at_once: bool) -> list[list[int]]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        requests = [generate_request(p, max_tokens=NUM_TOKENS, ignore_eos=True) for p in prompts()]
        if at_once:
            results = await asyncio.gather(*(read_aio(stub.Generate(r)) for r in requests))
        else:
            results = [await read_aio(stub.Generate(r)) for r in requests]
    return [result.outputs[0] for result in results]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
async def test_what_is_computed_again_in_bfloat16_draws_what_it_draws_alone(
    kv_cache_dtype: str, run_dir: Callable[[], Path]
):
    needed = sum(-(-(len(p) + NUM_TOKENS) // BLOCK_SIZE) for p in prompts())
    worker = ["--dtype=bfloat16", f"--kv-cache-dtype={kv_cache_dtype}", "--max-num-seqs=24"]
    worker += [f"--num-blocks={needed // 4}"]
    scheduler = ["--preemption-mode=recompute", "--no-enable-prefix-caching"]
    with Service(run_dir(), SHIPPED_MODEL, worker=worker, scheduler=scheduler) as service:
        alone = await generate(service, at_once=False)
        together = await generate(service, at_once=True)
        metrics = await asyncio.to_thread(service.metrics, service.scheduler)
    assert metrics["quire_recomputed_tokens_total"] > 1000
    differ = [i for i, (a, b) in enumerate(zip(alone, together, strict=True)) if a != b]
    assert differ == []

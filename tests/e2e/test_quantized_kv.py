"""With quantized KV, a device pool of a third of the demand changes no token."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import generate_request, read_aio
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

NUM_REQUESTS = 12
NUM_TOKENS = 40
PROMPT_LEN = 48


async def generate(service: Service) -> list[list[int]]:
    draw = random.Random(3)
    prompts = [[draw.randrange(5, 500) for _ in range(PROMPT_LEN)] for _ in range(NUM_REQUESTS)]
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        streams = (
            stub.Generate(generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
            for prompt in prompts
        )
        results = await asyncio.gather(*map(read_aio, streams))
    return [result.outputs[0] for result in results]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
async def test_swapping_changes_no_token(
    kv_cache_dtype: str, model_dirs: ModelDirs, run_dir: Callable[[], Path]
):
    blocks_of_each = -(-(PROMPT_LEN + NUM_TOKENS) // 16)
    outputs, num_preemptions = [], []
    for num_blocks in (NUM_REQUESTS * blocks_of_each + 8, NUM_REQUESTS * blocks_of_each // 3):
        worker = [f"--kv-cache-dtype={kv_cache_dtype}", f"--num-blocks={num_blocks}"]
        worker += ["--host-kv-memory-gb=0.05", "--kv-checksum"]
        scheduler = ["--preemption-mode=swap"]
        with Service(
            run_dir(), model_dirs.get("qwen3"), worker=worker, scheduler=scheduler
        ) as service:
            outputs.append(await generate(service))
            metrics = await asyncio.to_thread(service.metrics, service.scheduler)
            num_preemptions.append(metrics["quire_num_preemptions_total"])
            assert metrics["quire_recomputed_tokens_total"] == 0
    assert num_preemptions[0] == 0 < num_preemptions[1]
    assert outputs[0] == outputs[1]
    assert all(len(output) == NUM_TOKENS for output in outputs[0])

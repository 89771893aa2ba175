"""With a device pool of a tenth of the demand, the tokens are the same in every mode."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker.kv.layout import block_bytes
from gpu_worker.models.registry import open_model
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import eventually
from tests.e2e.generation import generate_request, read, read_aio
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

NUM_REQUESTS = 100
NUM_TOKENS = 64
BLOCK_SIZE = 16
NUM_TOKENS_WITHOUT_ROOM = 200
"""Of 12,000: while a slow disk is written, the host may have no room for a preempted sequence."""
ALL_AT_ONCE = ["--max-num-seqs=100"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts; in half of them, groups of four share a prefix."""
    draw = random.Random(0)
    prompts = []
    for i in range(NUM_REQUESTS):
        common = prompts[-1][:32] if i % 4 and i < NUM_REQUESTS // 2 else []
        rest = [draw.randrange(5, 500) for _ in range(draw.randrange(40, 80))]
        prompts.append(common + rest)
    return prompts


@pytest.fixture(scope="module")
def num_blocks(prompts: list[list[int]]) -> int:
    """A tenth of the blocks that the prompts need together."""
    return sum(-(-(len(p) + NUM_TOKENS) // BLOCK_SIZE) for p in prompts) // 10


async def generate(service: Service, prompts: list[list[int]]) -> list[list[int]]:
    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        streams = (
            stub.Generate(generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
            for prompt in prompts
        )
        results = await asyncio.gather(*map(read_aio, streams))
    return [result.outputs[0] for result in results]


@pytest.fixture(scope="module")
def expected(
    prompts: list[list[int]], model_dirs: ModelDirs, run_dir: Callable[[], Path]
) -> list[list[int]]:
    """The outputs of a service with room for all."""
    worker = [*ALL_AT_ONCE, "--num-blocks=2000"]
    with Service(run_dir(), model_dirs.get("qwen3"), worker=worker) as service:
        outputs = asyncio.run(generate(service, prompts))
        metrics = service.metrics(service.scheduler)
        assert metrics["quire_num_preemptions_total"] == 0
        assert metrics["quire_kv_host_blocks"] == 0, "a CPU has no host tier unless told to"
    return outputs


@pytest.fixture(scope="module")
def cramped(
    num_blocks: int, model_dirs: ModelDirs, run_dir: Callable[[], Path]
) -> Iterator[Service]:
    worker = [*ALL_AT_ONCE, f"--num-blocks={num_blocks}", "--host-kv-memory-gb=0.05"]
    worker.append("--kv-checksum")
    with Service(run_dir(), model_dirs.get("qwen3"), worker=worker) as service:
        yield service


async def run(service: Service, prompts: list[list[int]], *flags: str):
    await asyncio.to_thread(service.use_scheduler, *flags)
    outputs = await generate(service, prompts)
    metrics = await asyncio.to_thread(service.metrics, service.scheduler)
    load = await asyncio.to_thread(service.wait_until_idle)
    assert load.num_free_host_blocks + load.num_cached_host_blocks == load.num_host_blocks > 0
    assert metrics["quire_num_preemptions_total"] > 0
    return outputs, metrics


async def test_by_swap_alone(cramped, prompts, expected):
    outputs, metrics = await run(cramped, prompts, "--preemption-mode=swap")
    assert outputs == expected
    assert metrics["quire_kv_swapped_in_blocks_total"] > metrics["quire_kv_promoted_blocks_total"]
    assert metrics["quire_recomputed_tokens_total"] == 0


async def test_by_swap_without_prefix_cache(cramped, prompts, expected):
    flags = ["--preemption-mode=swap", "--no-enable-prefix-caching", "--max-swap-blocks=3"]
    outputs, metrics = await run(cramped, prompts, *flags)
    assert outputs == expected
    assert metrics["quire_recomputed_tokens_total"] == 0
    assert metrics["quire_kv_demoted_blocks_total"] == 0
    swapped_in = metrics["quire_kv_swapped_in_blocks_total"]
    # A sequence preempted during its swap-in was swapped in twice.
    assert swapped_in >= metrics["quire_kv_swapped_out_blocks_total"] > 0


async def test_by_recompute_alone(cramped, prompts, expected):
    flags = ["--preemption-mode=recompute", "--no-enable-prefix-caching"]
    outputs, metrics = await run(cramped, prompts, *flags)
    assert outputs == expected
    assert metrics["quire_kv_swapped_out_blocks_total"] == 0
    assert metrics["quire_recomputed_tokens_total"] > 0


async def test_by_cost(cramped, prompts, expected):
    outputs, _ = await run(cramped, prompts)
    assert outputs == expected


@pytest.fixture(scope="module", params=["none", "zstd"])
def with_disk(
    request: pytest.FixtureRequest,
    num_blocks: int,
    model_dirs: ModelDirs,
    run_dir: Callable[[], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    """A service with a tenth of the blocks on the device, a fortieth on the host, and all on
    disk."""
    model = model_dirs.get("qwen3")
    config = open_model(model).config
    block_gb = block_bytes(config, BLOCK_SIZE, torch.float32) / 1024**3
    worker = [*ALL_AT_ONCE, f"--num-blocks={num_blocks}", "--kv-checksum"]
    worker += [f"--host-kv-memory-gb={num_blocks // 4 * block_gb}"]
    worker += [f"--disk-kv-memory-gb={2000 * block_gb}", f"--disk-kv-codec={request.param}"]
    worker += [f"--disk-kv-dir={tmp_path_factory.mktemp('disk')}"]
    with Service(run_dir(), model, worker=worker) as service:
        yield service


async def test_by_swap_to_the_disk(with_disk, prompts, expected):
    """The host has room for a fraction of the swapped KV; still hardly anything is recomputed."""
    outputs, metrics = await run(with_disk, prompts, "--preemption-mode=swap")
    assert outputs == expected
    assert metrics["quire_recomputed_tokens_total"] <= NUM_TOKENS_WITHOUT_ROOM
    assert metrics["quire_kv_stored_blocks_total"] > 0
    assert metrics["quire_kv_loaded_blocks_total"] > 0
    assert metrics["quire_kv_failed_disk_moves_total"] == 0
    worker_metrics = await asyncio.to_thread(with_disk.metrics, with_disk.worker)
    assert worker_metrics["quire_worker_kv_transfer_bytes_total"] > 0
    assert worker_metrics["quire_worker_kv_transfer_seconds_total"] > 0


async def test_by_swap_to_the_disk_without_prefix_cache(with_disk, prompts, expected):
    """Only spilled blocks are stored, and all of them come back."""
    flags = ["--preemption-mode=swap", "--no-enable-prefix-caching"]
    outputs, metrics = await run(with_disk, prompts, *flags)
    assert outputs == expected
    assert metrics["quire_recomputed_tokens_total"] <= NUM_TOKENS_WITHOUT_ROOM
    spilled = metrics["quire_kv_spilled_blocks_total"]
    assert metrics["quire_kv_stored_blocks_total"] == spilled > 0
    assert metrics["quire_kv_loaded_blocks_total"] == spilled


async def test_by_cost_with_the_disk(with_disk, prompts, expected):
    outputs, _ = await run(with_disk, prompts)
    assert outputs == expected


async def test_a_killed_worker_s_blocks_are_found_by_the_next(with_disk, prompts, expected):
    """It is killed while it stores and loads; tokens from the found blocks are exact."""
    await asyncio.to_thread(with_disk.use_scheduler, "--preemption-mode=swap")
    before = await asyncio.to_thread(num_disk_moves, with_disk)
    answering = asyncio.create_task(generate(with_disk, prompts))
    while await asyncio.to_thread(num_disk_moves, with_disk) < before + NUM_REQUESTS // 2:
        assert not answering.done()
    with_disk.worker.kill()
    await asyncio.to_thread(with_disk.start_worker)
    assert await answering == expected
    await asyncio.to_thread(with_disk.wait_until_idle)
    with_disk.worker.kill()
    await asyncio.to_thread(with_disk.start_worker)

    def has_found() -> bool | None:
        load = with_disk.load()
        return (load.num_cached_disk_blocks > 0 and not load.num_cached_host_blocks) or None

    await asyncio.to_thread(eventually, has_found, "the next worker has found blocks")
    num_hits = 0  # of prompts that share no prefix: which of them the disk has depends on time
    for prompt, tokens in list(zip(prompts, expected, strict=True))[NUM_REQUESTS // 2 :]:
        request = generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        answer = read(with_disk.stub.Generate(request))
        assert answer.outputs[0] == tokens
        num_hits += answer.usage.cached_tokens > 0
        if num_hits == 4:
            break
    assert num_hits > 0
    metrics = await asyncio.to_thread(with_disk.metrics, with_disk.scheduler)
    assert metrics["quire_kv_failed_disk_moves_total"] == 0


def num_disk_moves(service: Service) -> float:
    """Blocks stored and loaded; few are stored where earlier tests have left them on disk."""
    metrics = service.metrics(service.scheduler)
    return metrics["quire_kv_stored_blocks_total"] + metrics["quire_kv_loaded_blocks_total"]

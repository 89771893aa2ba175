"""Three models on one device: memory moves from the idle models to the busy one.

The device is a fake of the driver's calls, with host memory that is just enough for the three
initial pools. Models, pools and schedulers are real, and run in one process.
"""

import asyncio
import contextlib

import grpc
import pytest

from gpu_worker.app import run_worker
from gpu_worker.kv.layout import block_bytes
from gpu_worker.loading import kv_memory
from gpu_worker.models.registry import open_model
from gpu_worker.settings import WorkerSettings
from quire.v1 import scheduler_pb2
from tests.unit.gpu_worker.fake_cuda_driver import GRANULARITY, Budget, FakeCudaDriver, HostChunks
from tests.unit.scheduler_svc.scheduler_harness import FakeRouter, running_scheduler

NAMES = ("busy", "idle", "third")
NUM_BLOCKS, LEAST, BLOCK_SIZE = 40, 8, 16  # enough for a sequence of 128 tokens
PROMPTS = [[5 + key] * 16 for key in range(8)]
MAX_TOKENS = 96  # so 56 blocks in all


@contextlib.asynccontextmanager
async def model_in_service(name, directory, folder):
    """A worker, its scheduler and a router's stream to it."""
    worker_settings = WorkerSettings(
        _env_file=None,
        model=directory,
        served_model_name=name,
        uds=folder / f"{name}.w",
        http_port=0,
        device="cpu",
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        max_kv_memory_gb=0.01,
        max_model_len=LEAST * BLOCK_SIZE,
        num_threads=1,
        drain_s=1,
    )
    stop, is_up = asyncio.Event(), asyncio.Event()

    async def on_started(_):
        is_up.set()

    worker = asyncio.create_task(run_worker(worker_settings, on_started=on_started, stop=stop))
    waiting = asyncio.create_task(is_up.wait())
    await asyncio.wait([worker, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert not worker.done(), worker.exception()
    try:
        target = f"unix:{worker_settings.uds}"
        async with running_scheduler(folder, [target], socket=f"{name}.s") as scheduler:
            router = await FakeRouter(scheduler.target).connect()
            router.first_key = 0
            yield router
            await router.disconnect()
    finally:
        stop.set()
        await worker


async def resize(router, num_blocks):
    request = scheduler_pb2.ResizeKvRequest(num_blocks=num_blocks)
    *_, last = [answer async for answer in router.stub.ResizeKv(request)]
    assert last.is_done


async def submit(router, prompts):
    """Return the keys of requests for tokens of `prompts`."""
    keys = range(router.first_key, router.first_key + len(prompts))
    router.first_key += len(prompts)
    for key, prompt in zip(keys, prompts, strict=True):
        await router.submit(
            key, prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, tenant=str(key)
        )
    return keys


async def outputs(router, keys):
    await router.read_until_finished(*keys)
    return [router.tokens[key] for key in keys]


async def test_blocks_go_from_idle_models_to_a_busy_one(model_dirs, run_dir, monkeypatch):
    directory, folder = model_dirs.get("llama"), run_dir()
    folder.mkdir()
    size = block_bytes(open_model(directory).config, BLOCK_SIZE, kv_memory.torch.float32)
    pool_bytes = -(-NUM_BLOCKS * size // (2 * GRANULARITY)) * 2 * GRANULARITY
    budget = Budget(len(NAMES) * pool_bytes)
    monkeypatch.setattr(
        kv_memory, "_reserve", lambda _, most: HostChunks(FakeCudaDriver(budget), most)
    )
    async with contextlib.AsyncExitStack() as stack:
        busy, idle, third = [
            await stack.enter_async_context(model_in_service(name, directory, folder))
            for name in NAMES
        ]
        assert budget.used_bytes == budget.num_bytes
        expected = await outputs(busy, await submit(busy, PROMPTS))
        with pytest.raises(grpc.aio.AioRpcError, match="has less left"):
            await resize(busy, 2 * NUM_BLOCKS)

        slow = await submit(idle, PROMPTS[:3])  # 21 blocks, most of which must be freed
        await idle.wait_for_load(lambda load: load.num_requests_running == 3)
        waiting = await submit(busy, PROMPTS)
        await asyncio.gather(resize(idle, LEAST), resize(third, LEAST))
        assert budget.used_bytes < budget.num_bytes // 2
        await resize(busy, NUM_BLOCKS + 2 * (NUM_BLOCKS - LEAST) - 2)
        assert await outputs(busy, waiting) == expected
        assert await outputs(idle, slow) == expected[:3]

        assert await outputs(busy, await submit(busy, PROMPTS)) == expected
        load = await busy.load()
        assert load.num_cached_blocks > NUM_BLOCKS, "they had more than the pool began with"
        assert budget.most_used_bytes <= budget.num_bytes

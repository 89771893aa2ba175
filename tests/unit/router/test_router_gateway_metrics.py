"""The cell's gauges on the router's port, as an endpoint picker scrapes them."""

import asyncio

import aiohttp
import pytest
from keyed_router import plain_settings, running
from prometheus_client.parser import text_string_to_metric_families

from contract.request import GenerateRequest
from quire.v1 import common_pb2
from router.gateway_metrics import GatewayMetrics


@pytest.fixture
def settings(model_dir, tmp_path):
    return plain_settings(model_dir, tmp_path)


async def scrape(http: aiohttp.ClientSession):
    async with http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {
            family.name: [(sample.labels, sample.value) for sample in family.samples]
            for family in families
            if family.name.startswith(("vllm:", "quire_cell_"))
        }


async def test_a_gateway_reads_the_cells_load_under_both_names(settings, tmp_path):
    async with running(settings, tmp_path) as router:
        router.scheduler.load = common_pb2.Load(
            num_requests_running=3,
            num_requests_waiting=5,
            num_blocks=200,
            num_free_blocks=40,
            num_cached_blocks=10,
            block_size=16,
            num_workers=2,
        )
        found = await scrape(router.http)
    model = {"model_name": "tiny"}
    for prefix in ("vllm:", "quire_cell_"):
        assert found[f"{prefix}num_requests_waiting"] == [(model, 5)]
        assert found[f"{prefix}num_requests_running"] == [(model, 3)]
        assert found[f"{prefix}kv_cache_usage_perc"] == [(model, 0.75)]
        info = {**model, "block_size": "16", "num_gpu_blocks": "200"}
        assert found[f"{prefix}cache_config_info"] == [(info, 1)]
        assert found[f"{prefix}lora_requests_info"] == []


async def test_adapters_in_use_are_told_by_whether_their_requests_run(router):
    model_changed = asyncio.create_task(router.inference.schedulers.model_change())
    await asyncio.sleep(0)
    await router.scheduler.send_adapters("fr", "de")
    await model_changed
    lives = [
        await router.inference.generate(GenerateRequest(prompt=(5, 6), model=name))
        for name in ("fr", "de")
    ]
    first = (await router.scheduler.submits.get()).first_seq_key
    await router.scheduler.step({first: [70]}, admitted={first: 0})
    await anext(aiter(lives[0]))
    families = {family.name: family for family in GatewayMetrics(router.cells).collect()}
    (sample,) = families["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "model_name": "tiny",
        "max_lora": "2",
        "running_lora_adapters": "fr",
        "waiting_lora_adapters": "de",
    }
    assert sample.value > 1e9
    for live in lives:
        await live.aclose()


async def test_without_a_scheduler_the_cell_has_no_load_and_the_scrape_still_answers(
    settings, tmp_path
):
    async with running(settings, tmp_path) as router:
        router.scheduler.lives.clear()  # it hangs
        found = await scrape(router.http)
        assert found["vllm:num_requests_waiting"] == []
        router.scheduler.lives.set()


async def test_scrapes_at_the_same_time_ask_once(router):
    metrics = GatewayMetrics(router.cells)
    before = router.scheduler.num_load_calls
    await asyncio.gather(*(metrics.refresh() for _ in range(8)))
    assert router.scheduler.num_load_calls == before + 1

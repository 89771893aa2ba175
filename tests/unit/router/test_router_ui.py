"""The web page's routes: its files, and its JSON."""

import asyncio
import re

import aiohttp
import pytest
from router_fake_scheduler import FakeScheduler

from contract.errors import InvalidArgumentError
from quire.v1 import common_pb2, kv_pb2
from router.app import run_router
from router.settings import RouterSettings
from router.ui.pages import read_pages
from router.ui.wire import activity_to_json, kv_to_json, query_from_url
from rpc.settings import parse_settings

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def http(model_dir, tmp_path):
    scheduler = FakeScheduler(tmp_path / "s")
    await scheduler.start()
    async with served(model_dir, tmp_path) as session:
        while (await get(session, "/ready"))[0] != 200:
            pass
        yield session
    await scheduler.stop()


class served:  # noqa: N801 - used as a function
    """A router, and an HTTP client."""

    def __init__(self, model_dir, tmp_path, **flags):
        self._settings = RouterSettings(
            model=model_dir,
            scheduler=f"unix:{tmp_path / 's'}",
            uds=tmp_path / "r",
            http_port=0,
            drain_s=1,
            **flags,
        )

    async def __aenter__(self):
        self._stop = asyncio.Event()
        addresses = asyncio.get_running_loop().create_future()

        async def on_started(bound):
            addresses.set_result(bound)

        self._task = asyncio.create_task(
            run_router(self._settings, self._stop, on_started=on_started)
        )
        self._session = aiohttp.ClientSession(f"http://{(await addresses).http}")
        return self._session

    async def __aexit__(self, *_):
        await self._session.close()
        self._stop.set()
        await self._task


async def get(http, path):
    async with http.get(path) as response:
        return response.status, await response.json()


async def test_the_page_runs_only_what_the_router_serves(http):
    async with http.get("/ui") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    async with http.get("/ui/", allow_redirects=True) as response:
        assert response.url.path == "/ui"
    async with http.get("/ui/main.js") as response:
        assert response.content_type == "text/javascript"


def test_the_files_name_only_each_other_and_nothing_is_inline():
    pages = {page.path: page.content.decode() for page in read_pages()}
    html = pages["/ui"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    for path in re.findall(r'(?:src|href)="([^"]*)"', html):
        assert f"/{path}" in pages
    for path, text in pages.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert "innerHTML" not in text
        if path.endswith(".js"):
            for module in re.findall(r'^(?:import .* from|import) "\./(.*)";$', text, re.MULTILINE):
                assert f"/ui/{module}" in pages


async def test_the_load_is_that_of_the_scheduler(http):
    status, load = await get(http, "/ui/api/load")
    assert status == 200
    assert list(load) == [field.name for field in common_pb2.Load.DESCRIPTOR.fields]


async def test_kv_is_asked_for_as_the_contract_has_it(http):
    status, body = await get(http, "/ui/api/kv?first_block=16&block_tables=true")
    assert status == 200
    (worker,) = body["workers"]
    assert (worker["worker"], worker["block_size"]) == ("w", 16)
    status, body = await get(http, "/ui/api/kv?worker=nowhere")
    assert status == 404
    assert "nowhere" in body["error"]["message"]


async def test_steps_come_as_columns(http):
    status, body = await get(http, "/ui/api/activity?worker=w&after_step_id=4")
    assert status == 200
    (worker,) = body["workers"]
    assert worker["num_steps"] == 9
    assert worker["steps"]["step_id"] == [5]
    assert worker["steps"]["num_decode_tokens"] == [2]


async def test_a_query_that_is_not_understood_is_refused_by_name(http):
    for query, words in {
        "blocks=1": "blocks is '1'; there is no such field",
        "first_block=-1": "first_block is '-1'; it must be an integer in [0, 2**32 - 1]",
        "first_block=4294967296": "first_block is '4294967296'; it must be an integer",
        "first_block=": "first_block is ''; it must be an integer",
        "block_tables=1": "block_tables is '1'; it must be true or false",
    }.items():
        status, body = await get(http, f"/ui/api/kv?{query}")
        assert status == 400
        assert words in body["error"]["message"]


async def test_without_a_scheduler_the_page_is_there_and_its_data_is_not(model_dir, tmp_path):
    async with served(model_dir, tmp_path) as http:
        async with http.get("/ui") as response:
            assert response.status == 200
        status, body = await get(http, "/ui/api/load")
    assert status == 503
    assert "not connected" in body["error"]["message"]


async def test_no_ui_has_no_page(model_dir, tmp_path):
    async with served(model_dir, tmp_path, ui=False) as http:
        for path in ("/ui", "/ui/main.js", "/ui/api/load"):
            async with http.get(path) as response:
                assert response.status == 404
    settings = parse_settings(RouterSettings, "quire-router", ["--no-ui", f"--model={model_dir}"])
    assert not settings.ui


def test_messages_become_plain_values():
    seq = kv_pb2.SequenceKv(
        seq_id=2**53 - 1,
        request_id="<b>",
        status=kv_pb2.SEQUENCE_STATUS_DECODE,
        device_block_ids=b"\x01\0\0\0",
    )
    tier = kv_pb2.TierKv(tier=kv_pb2.KV_TIER_HOST, states=b"\x01\x05")
    value = kv_to_json(kv_pb2.WorkerKv(tiers=[tier], sequences=[seq]))
    assert value["tiers"][0]["tier"] == "host"
    assert value["tiers"][0]["states"] == "AQU="
    told = value["sequences"]
    assert told["seq_id"] == [2**53 - 1]
    assert told["request_id"] == ["<b>"]
    assert told["status"] == ["decode"]
    assert told["device_block_ids"] == ["AQAAAA=="]
    assert kv_to_json(kv_pb2.WorkerKv())["sequences"]["status"] == []
    load = common_pb2.Load(fragmentation=0.5)
    assert activity_to_json(common_pb2.WorkerActivity(load=load))["load"]["fragmentation"] == 0.5


def test_fields_that_were_not_requested_are_not_set():
    query = query_from_url(kv_pb2.KvQuery, {"max_blocks": "0"})
    assert query.HasField("max_blocks")
    assert not query.HasField("max_sequences")
    with pytest.raises(InvalidArgumentError):
        query_from_url(kv_pb2.KvQuery, {"max_blocks": "zero"})

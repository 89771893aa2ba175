"""/v1/files and /v1/batches with the `openai` package: lines survive their router."""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest
from aiohttp import web
from router_fake_scheduler import LENGTH

from router.http.api import routes
from router.http.batches.batches import Batches
from router.turns.turns import Turns

KEPT = {"retention_s": 60, "usage_retention_s": 60}
pytestmark = pytest.mark.timeout(60)

CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 9},
    "/v1/completions": {"prompt": "Say", "max_tokens": 9},
    "/v1/responses": {"input": "Say", "max_output_tokens": 9},
}


@asynccontextmanager
async def serving(router, store):
    """Serves the API over a store, as one start of a router does."""
    turns = Turns(store, router.inference, router.usage, **KEPT, tick_s=0.02)
    batches = Batches(router.inference, turns, 60, tick_s=0.02)
    app = web.Application()
    app.add_routes(
        routes(router.inference, None, max_body_bytes=2**20, turns=turns, batches=batches)
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    tasks = [asyncio.create_task(turns.run()), asyncio.create_task(batches.run())]
    url = f"http://{host}:{port}/v1"
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
    finally:
        await runner.cleanup()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.close()


def line(custom_id, url=CHAT, **fields):
    body = BODIES[url] | fields
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


async def created(client, *lines, url=CHAT):
    content = "\n".join(lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes) == ("in.jsonl", len(content))
    return await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"}
    )


async def ended(client, batch):
    while (batch := await client.batches.retrieve(batch.id)).status in (
        "in_progress",
        "cancelling",
    ):
        pass
    return batch


async def lines_of(client, file_id):
    content = await client.files.content(file_id)
    return {value["custom_id"]: value for value in map(json.loads, content.text.splitlines())}


async def answer(router, text):
    submit = await router.scheduler.submits.get()
    key = submit.first_seq_key
    await router.scheduler.step({key: router.tokens(text)}, finished={key: LENGTH})
    return submit


@pytest.mark.parametrize("url", BODIES)
async def test_lines_are_answered_and_told(router, new_store, url):
    async with serving(router, new_store()) as client:
        batch = await created(
            client, line("a", url), line("b", url), line("c", url, top_p=2), url=url
        )
        assert (batch.status, batch.metadata) == ("in_progress", {"a": "b"})
        submits = [await answer(router, text) for text in ("one", "two")]
        assert {submit.priority for submit in submits} == {-100}
        batch = await ended(client, batch)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        told = await lines_of(client, batch.output_file_id)
        texts = set()
        for custom_id in ("a", "b"):
            response = told[custom_id]["response"]
            assert (response["status_code"], told[custom_id]["error"]) == (200, None)
            body = response["body"]
            if url == CHAT:
                texts.add(body["choices"][0]["message"]["content"])
                assert body["usage"]["completion_tokens"] > 0
            elif url == "/v1/completions":
                texts.add(body["choices"][0]["text"])
            else:
                texts.add(body["output"][0]["content"][0]["text"])
        assert texts == {"one", "two"}
        (failed,) = (await lines_of(client, batch.error_file_id)).values()
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("c", 400)
        assert "top_p" in failed["response"]["body"]["error"]["message"]
        assert [each.id async for each in client.batches.list()] == [batch.id]
        purposes = [file.purpose async for file in client.files.list()]
        assert sorted(purposes) == ["batch", "batch_output", "batch_output"]


async def test_a_batch_goes_on_at_the_next_start(router, new_store):
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a"), line("b"))
        await answer(router, "one")
        await router.scheduler.submits.get()  # the second has begun
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            pass
    async with serving(router, new_store()) as client:
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        await answer(router, "two")
        batch = await ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)


async def test_a_cancelled_batch_keeps_what_is_answered(router, new_store):
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a"), line("b"))
        await answer(router, "one")
        await router.scheduler.submits.get()
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            pass
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
        assert len(await lines_of(client, batch.output_file_id)) == 1
        (left,) = (await lines_of(client, batch.error_file_id)).values()
        assert left["error"]["code"] == "batch_cancelled"
        assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_wrong_file_fails_its_batch(router, new_store):
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a"), "{", line("a"), line("b", "/v1/completions"))
        assert batch.status == "failed"
        assert [(error.line, error.param) for error in batch.errors.data] == [
            (2, "body"),
            (3, "custom_id"),
            (4, "url"),
        ]
        empty = await created(client, "")
        assert [error.code for error in empty.errors.data] == ["empty_file"]
        with pytest.raises(openai.NotFoundError, match="file"):
            await client.batches.create(
                input_file_id="file-1", endpoint=CHAT, completion_window="24h"
            )
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=b"x", purpose="assistants")


async def test_a_file_can_be_deleted(router, new_store):
    async with serving(router, new_store()) as client:
        file = await client.files.create(file=("x", b"text"), purpose="batch")
        assert (await client.files.content(file.id)).content == b"text"
        assert (await client.files.retrieve(file.id)).bytes == 4
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)

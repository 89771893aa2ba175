"""/v1/files and /v1/batches with the `openai` package: lines survive their router."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

import openai
import pytest
from aiohttp import web
from router_fake_scheduler import LENGTH, FakeScheduler

from quire.v1 import common_pb2
from router.http.api import routes
from router.http.batches import lines
from router.http.batches.batches import Batches, _Results
from router.http.batches.lines import turn_of_line
from router.http.batches.store import Batch, BatchStore
from router.stored_turns.database import SqliteConnection
from router.stored_turns.groups import GroupCounts
from router.stored_turns.postgres import PostgresConnection
from router.stored_turns.store import insert_turn
from router.stored_turns.turn import StoreError
from router.stored_turns.turns import Turns

KEPT = {"retention_s": 60, "usage_retention_s": 60}
pytestmark = pytest.mark.timeout(60)

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 9},
    "/v1/completions": {"prompt": "Say", "max_tokens": 9},
    "/v1/responses": {"input": "Say", "max_output_tokens": 9},
}
VECTORS = {"input": ["Say", "more"]}


BOTH = pytest.mark.parametrize("place", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def place(request, path):
    """A file, or a database of PostgreSQL if the test says so."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return str(path)
    return request.getfixturevalue("postgres").new_database()


@pytest.fixture(autouse=True)
def _embeds(monkeypatch):
    """The model makes vectors, too."""
    tasks = [common_pb2.TASK_GENERATE, common_pb2.TASK_EMBED]
    fields = {"tasks": tasks, "embedding_size": 2}
    monkeypatch.setattr(FakeScheduler, "model_fields", fields)


@asynccontextmanager
async def serving(router, store):
    """Serves the API over a store, as one start of a router does."""
    turns = Turns(store, router.cells, router.usage, **KEPT, tick_s=0.02)
    batches = Batches(router.cells, turns, 60, 2**20, tick_s=0.02)
    app = web.Application()
    app.add_routes(routes(router.cells, None, max_body_bytes=2**20, turns=turns, batches=batches))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    tasks = [asyncio.create_task(turns.run()), asyncio.create_task(batches.run())]
    url = f"http://{host}:{port}/v1"
    try:
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=None
        ) as client:
            yield client
    finally:
        await runner.cleanup()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns.close()


def line(custom_id, url=CHAT, **fields):
    body = BODIES.get(url, VECTORS) | fields
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
        "validating",
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
        assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
        assert batch.request_counts.total == 3
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
        await router.scheduler.submits.get()  # the second line has begun
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            pass
    async with serving(router, new_store()) as client:
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        await answer(router, "two")
        batch = await ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)


async def test_lines_that_end_together_leave_the_loop_to_others_between_them(
    router, new_store, monkeypatch
):
    in_this_round, num_per_round = [], []

    def note():
        if not in_this_round:
            asyncio.get_running_loop().call_soon(end_round)
        in_this_round.append(1)

    def end_round():
        num_per_round.append(len(in_this_round))
        in_this_round.clear()

    class Noted(lines.BatchLines):
        async def request(self, turn):
            note()
            return await super().request(turn)

        async def result(self, *args):
            note()
            return await super().result(*args)

    monkeypatch.setattr("router.http.batches.batches.BatchLines", Noted)
    async with serving(router, new_store()) as client:
        batch = await created(client, *map(line, "abc"))
        keys = [(await router.scheduler.submits.get()).first_seq_key for _ in "abc"]
        tokens = router.tokens("one")
        await router.scheduler.step(
            dict.fromkeys(keys, tokens), finished=dict.fromkeys(keys, LENGTH)
        )
        assert (await ended(client, batch)).request_counts.completed == 3
    assert num_per_round == [1] * 6


@BOTH
async def test_a_call_that_is_sent_again_makes_no_second_file_and_batch(router, new_store):
    def options(key):
        return {"extra_headers": {"Idempotency-Key": key}}

    async with serving(router, new_store()) as client:
        upload = {"file": ("in.jsonl", line("a").encode()), "purpose": "batch"}
        files = [await client.files.create(**upload, **options("f")) for _ in range(2)]
        assert files[0] == files[1]
        other = upload | {"file": ("in.jsonl", b"other")}
        with pytest.raises(openai.ConflictError, match="'f' belongs to another request"):
            await client.files.create(**other, **options("f"))
        ask = {"input_file_id": files[0].id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await client.batches.create(**ask, **options("b"))
        again = await asyncio.gather(
            *(client.batches.create(**ask, **options("b")) for _ in range(3))
        )
        assert {each.id for each in again} == {batch.id}
        with pytest.raises(openai.ConflictError, match="'b' belongs to another request"):
            await client.batches.create(**ask, metadata={"a": "b"}, **options("b"))
        with pytest.raises(openai.BadRequestError, match="it must be 1 to 255 printable"):
            await client.batches.create(**ask, **options("x" * 256))
        await answer(router, "one")
        ended_batch = await ended(client, batch)
        assert await client.batches.create(**ask, **options("b")) == ended_batch
        assert [each.id async for each in client.batches.list()] == [batch.id]
        assert len([each async for each in client.files.list()]) == 2  # input and output


@BOTH
async def test_files_expire_when_their_clients_say(router, new_store, monkeypatch):
    expiry = {"anchor": "created_at", "seconds": 3600}
    store = new_store()
    async with serving(router, store) as client:
        upload = {"file": ("in.jsonl", line("a").encode()), "purpose": "batch"}
        kept = await client.files.create(**upload)
        call = {"expires_after": expiry, "extra_headers": {"Idempotency-Key": "f"}}
        file = await client.files.create(**upload, **call)
        assert (kept.expires_at, file.expires_at) == (None, file.created_at + 3600)
        for wrong in ({"seconds": 3599}, {"seconds": 2592001}, {"anchor": "now"}):
            with pytest.raises(openai.BadRequestError, match=rf"expires_after.{next(iter(wrong))}"):
                await client.files.create(**upload, expires_after=expiry | wrong)
        ask = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await client.batches.create(**ask, output_expires_after=expiry)
        await answer(router, "one")
        batch = await ended(client, batch)
        output = await client.files.retrieve(batch.output_file_id)
        assert output.expires_at == output.created_at + 3600
        later = time.time() + 3600
        monkeypatch.setattr(SqliteConnection, "now", lambda *_: later)
        monkeypatch.setattr(PostgresConnection, "now", lambda *_: later)
        for gone in (file.id, output.id):
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(gone)
            with pytest.raises(openai.NotFoundError):
                await client.files.content(gone)
        batch_store = BatchStore(store.database)
        assert [each.id async for each in client.files.list()] == [kept.id]
        assert await batch_store.file_bytes("") == kept.bytes
        again = await client.files.create(**upload, **call)
        assert again.id != file.id
        assert [each.id async for each in client.files.list()] == [again.id, kept.id]
        await batch_store.sweep(10**9)
        assert [each.id async for each in client.files.list()] == [again.id, kept.id]


async def test_a_batch_tells_what_its_lines_used(router, new_store):
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a"), line("b"))
        assert batch.usage is None
        for text in ("one", "two three"):
            await answer(router, text)
        batch = await ended(client, batch)
        told = await lines_of(client, batch.output_file_id)
        usages = [each["response"]["body"]["usage"] for each in told.values()]
        assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in usages)
        assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in usages) > 0
        assert batch.usage.total_tokens == sum(each["total_tokens"] for each in usages)


@BOTH
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


@BOTH
async def test_lines_become_turns_in_slices_and_go_on_where_a_router_died(
    router, new_store, monkeypatch
):
    """One transaction for 50,000 lines would block the turns that clients wait for."""
    monkeypatch.setattr("router.http.batches.batches.SLICE", 2)
    sizes, fill = [], BatchStore.fill

    async def fill_once(self, batch, turns):
        sizes.append(len(turns))
        if len(sizes) == 2:
            raise StoreError("the router dies here")
        return await fill(self, batch, turns)

    monkeypatch.setattr(BatchStore, "fill", fill_once)
    async with serving(router, new_store()) as client:
        batch = await created(client, *map(line, "abcde"))
        submits = [await answer(router, text) for text in ("1", "2", "3", "4", "5")]
        batch = await ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 5)
        assert len({submit.request_id for submit in submits}) == 5
        assert sizes == [2, 2, 2, 1]
        assert batch.in_progress_at is not None


@BOTH
async def test_a_text_with_nul_is_as_any_other(router, new_store):
    async with serving(router, new_store()) as client:
        with pytest.raises(openai.NotFoundError, match="is not kept"):
            await client.files.retrieve("file-\0")
        batch = await created(client, line("a", model="\0"), line("b"))
        await answer(router, "one")
        batch = await ended(client, batch)
        assert batch.request_counts.completed == 1
        told = await lines_of(client, batch.error_file_id)
        error = told["a"]["response"]["body"]["error"]
        assert (error["code"], "is not served" in error["message"]) == ("model_not_found", True)


async def test_a_batch_that_meets_a_bug_is_not_tried_at_every_tick(router, new_store, monkeypatch):
    tried, advance = [], Batches._advance

    async def advance_or_break(self, batch):
        tried.append(batch.id)
        if batch.id == tried[0]:
            raise ZeroDivisionError
        await advance(self, batch)

    async with serving(router, new_store()) as client:
        for text in ("before", "after"):
            batch = await created(client, line("a"))
            await answer(router, text)
            await ended(client, batch)
            if text == "before":  # the first search for ownerless turns is over
                monkeypatch.setattr(Batches, "_advance", advance_or_break)
                broken = await created(client, line("b"))
                while not tried:
                    await client.models.list()
        assert tried.count(broken.id) == 1 < tried.count(batch.id)


async def test_a_file_is_split_and_parsed_off_the_loop(router, new_store, monkeypatch):
    threads = set()

    def turn_of(*args):
        threads.add(threading.current_thread())
        return turn_of_line(*args)

    monkeypatch.setattr("router.http.batches.batches.turn_of_line", turn_of)
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a"))
        await answer(router, "one")
        await ended(client, batch)
    assert threads
    assert threading.main_thread() not in threads


@BOTH
async def test_a_batch_that_has_ended_is_filled_no_more(router, new_store):
    store = new_store()
    async with serving(router, store) as client:
        batch = await ended(client, await created(client, "{", line("a")))
        kept = Batch(batch.id, "", 0.0, False, {})
        turn = turn_of_line(kept, 1, line("a").encode())
        assert not await BatchStore(store.database).fill(kept, [turn])
        assert not await store.is_group_live(batch.id)


@BOTH
async def test_what_an_ended_batch_has_left_is_deleted_at_the_next_start(router, new_store):
    store = new_store()
    gone = Batch("batch_gone", "", 0.0, False, {})
    left = turn_of_line(gone, 1, line("a").encode())
    await store.database.run(lambda cursor, _: insert_turn(cursor, left, "dead", 10.0**12))
    async with serving(router, store):
        while await store.list_group("", "batch_gone"):
            pass


async def test_a_line_is_as_large_as_a_body_and_a_large_one_is_read_off_the_loop(
    router, new_store, monkeypatch
):
    threads = []

    async def to_thread(work, *args):
        threads.append(work)
        return work(*args)

    async with serving(router, new_store()) as client:
        large = line("a", metadata={"a": "x" * 2**20})
        batch = await ended(client, await created(client, large))
        (error,) = batch.errors.data
        assert (error.line, error.param) == (1, "line")
        assert "it must have at most 1048576 (--max-body-mb)" in error.message
        monkeypatch.setattr("router.http.batches.lines.asyncio.to_thread", to_thread)
        batch = await created(client, line("b"), line("c", user="x" * 2**15))
        for text in ("one", "two"):
            await answer(router, text)
        batch = await ended(client, batch)
        assert batch.request_counts.completed == 2
        assert len([work for work in threads if work is lines._body_of]) == 2  # request and result


async def embedded(router):
    """Lets the scheduler answer the next request with a vector."""
    submit = await router.scheduler.submits.get()
    await router.scheduler.step(vectors={submit.first_seq_key: [len(submit.prompt_token_ids), 0.5]})
    return submit


async def test_lines_of_embeddings_are_answered_with_vectors(router, new_store):
    async with serving(router, new_store()) as client:
        batch = await created(
            client,
            line("a", EMBEDDINGS),
            line("b", EMBEDDINGS, dimensions=10**5),
            url=EMBEDDINGS,
        )
        submits = [await embedded(router) for _ in range(2)]
        assert {submit.priority for submit in submits} == {-100}
        assert all(submit.deadline_s > 0 for submit in submits)
        batch = await ended(client, batch)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (2, 1, 1)
        told = (await lines_of(client, batch.output_file_id))["a"]["response"]["body"]
        vectors = [each["embedding"] for each in told["data"]]
        prompts = [len(submit.prompt_token_ids) for submit in submits]
        assert sorted(vectors) == sorted([length, 0.5] for length in prompts)
        assert told["usage"]["prompt_tokens"] == sum(prompts) // 4
        assert batch.usage.input_tokens == sum(prompts) // 4
        (error,) = (await lines_of(client, batch.error_file_id)).values()
        assert error["response"]["status_code"] == 400
        assert "dimensions" in error["response"]["body"]["error"]["message"]


async def test_a_line_of_embeddings_is_computed_again_after_its_router_has_died(router, new_store):
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a", EMBEDDINGS), url=EMBEDDINGS)
        await router.scheduler.submits.get()
    while not router.scheduler.submits.empty():
        router.scheduler.submits.get_nowait()
    async with serving(router, new_store()) as client:
        for _ in range(2):
            await embedded(router)
        batch = await ended(client, batch)
        assert batch.request_counts.completed == 1


async def test_what_a_line_cannot_have_is_refused_by_name(router, new_store):
    async with serving(router, new_store()) as client:
        url = "/v1/responses"
        batch = await created(
            client, line("a", url, store=True), line("b", url, stream=True), url=url
        )
        batch = await ended(client, batch)
        told = await lines_of(client, batch.error_file_id)
        messages = [told[each]["response"]["body"]["error"]["message"] for each in "ab"]
        assert messages == [
            f"{name} is set; in a batch it must be unset" for name in ("store", "stream")
        ]


async def test_a_file_that_is_being_read_is_not_deleted(router, new_store, monkeypatch):
    async def fill(*_):
        raise StoreError("later")

    monkeypatch.setattr(BatchStore, "fill", fill)
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a"))
        with pytest.raises(openai.APIStatusError, match="is being read for batch_"):
            await client.files.delete(batch.input_file_id)


async def test_a_line_of_embeddings_has_a_bound_on_its_numbers(router, new_store):
    async with serving(router, new_store()) as client:
        large = line("a", EMBEDDINGS, input=["Say"] * 3, dimensions=2**17)
        batch = await ended(client, await created(client, large, url=EMBEDDINGS))
        (error,) = (await lines_of(client, batch.error_file_id)).values()
        assert error["response"]["status_code"] == 400
        message = error["response"]["body"]["error"]["message"]
        assert message == "input has 3 entries; with vectors of size 131072 it must have 1 to 2"
        assert router.scheduler.submits.empty()


@BOTH
async def test_a_batch_with_too_large_results_is_stopped_and_keeps_what_fits(
    router, new_store, monkeypatch
):
    store = new_store()
    async with serving(router, store) as client:
        batch = await created(client, *map(line, "abc"))
        await answer(router, "one")
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 1:
            pass
        most = (await store.count_group(batch.id)).result_bytes
        monkeypatch.setattr("router.http.batches.batches.MAX_RESULT_BYTES", most)
        await answer(router, "one")
        batch = await ended(client, batch)
        assert (batch.status, batch.failed_at is None) == ("failed", False)
        (error,) = batch.errors.data
        assert error.code == "results_too_large"
        assert "134217728" in error.message
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 1, 1)
        kept = await client.files.retrieve(batch.output_file_id)
        assert kept.bytes == most + 1
        told = await lines_of(client, batch.error_file_id)
        told |= await lines_of(client, batch.output_file_id)
        assert told.keys() == {*"abc"}
        codes = sorted((each["error"] or {}).get("code", "") for each in told.values())
        assert codes == ["", "results_too_large", "results_too_large"]
        assert await store.count_group(batch.id) == GroupCounts()


async def test_the_files_of_results_are_made_off_the_loop(router, new_store, monkeypatch):
    threads, add = set(), _Results.add

    def add_noted(*args):
        threads.add(threading.current_thread())
        add(*args)

    monkeypatch.setattr(_Results, "add", add_noted)
    async with serving(router, new_store()) as client:
        batch = await created(client, line("a"))
        await answer(router, "one")
        await ended(client, batch)
    assert threads
    assert threading.main_thread() not in threads

"""Stored responses: their turns continue without client, connection and router."""

import asyncio
import threading
from contextlib import asynccontextmanager

import aiohttp
import grpc
import openai
import pytest
from aiohttp import web
from router_fake_scheduler import LENGTH

from quire.v1 import common_pb2
from router.http.api import routes
from router.http.openai_responses import call
from router.http.openai_responses.body import ResponseBody
from router.live.usage import Used
from router.stored_turns.store import TurnChanges
from router.stored_turns.turn import StoreError, TurnStatus
from router.stored_turns.turns import Turns
from router.stored_turns.usage import read_usage
from router.text.chat_template import ChatTemplate

KEPT = {"retention_s": 60, "usage_retention_s": 60}
pytestmark = pytest.mark.timeout(60)

ASK = {"model": "tiny", "input": "Say", "max_output_tokens": 9}


@asynccontextmanager
async def serving(router, store, **options):
    """Serves the API over a store, as one start of a router does."""
    turns = Turns(store, router.cells, router.usage, **KEPT, tick_s=0.02, **options)
    app = web.Application()
    app.add_routes(routes(router.cells, None, max_body_bytes=2**20, turns=turns))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    writer = asyncio.create_task(turns.run())
    url = f"http://{host}:{port}/v1"
    try:
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=None
        ) as client:
            client.turns = turns
            yield client
    finally:
        await runner.cleanup()
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        await turns.close()


async def killed(client):
    """Ends the turns' tasks as a killed process does: nothing more is written."""
    turns = client.turns
    tasks = [running.task for running in turns._running.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def answered(router, submit, text, *, end=True):
    """Lets the scheduler answer a request with a text."""
    key = submit.first_seq_key
    tokens = router.tokens(text)
    await router.scheduler.step({key: tokens}, finished={key: LENGTH} if end else {})
    return tokens


async def wait_until(is_so):
    """Polls; each poll is a call of the store or of the service."""
    while not await is_so():
        pass


async def test_a_response_is_kept_and_read_again(router, new_store):
    async with serving(router, new_store()) as client:
        asking = asyncio.create_task(client.responses.create(**ASK, metadata={"a": "b"}))
        await answered(router, await router.scheduler.submits.get(), "one two")
        response = await asking
        assert response.output_text == "one two"
        assert response.model_extra["store"] is True
        again = await client.responses.retrieve(response.id)
        assert again == response
        items = await client.responses.input_items.list(response.id)
        assert [item.content[0].text for item in items.data] == ["Say"]
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_store_false_keeps_nothing(router, new_store):
    async with serving(router, new_store()) as client:
        asking = asyncio.create_task(client.responses.create(**ASK, store=False))
        await answered(router, await router.scheduler.submits.get(), "one")
        response = await asking
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_what_needs_a_store_is_refused_without_one(router):
    app = web.Application()
    app.add_routes(routes(router.cells, None, max_body_bytes=2**20))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    url = f"http://{host}:{port}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=None
    ) as client:
        for field in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match=r"stores no responses"):
                await client.responses.create(**ASK, **field)
        with pytest.raises(openai.BadRequestError, match="--turn-store"):
            await client.responses.retrieve("resp_1")
    await runner.cleanup()


async def test_a_response_in_the_background_is_told_before_it_is_computed(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        assert response.status == "in_progress"
        stored = await client.turns.store.find("", response.id)
        assert stored.status is TurnStatus.RUNNING
        submit = await router.scheduler.submits.get()
        assert (await client.responses.retrieve(response.id)).status == "in_progress"
        await answered(router, submit, "one two")

        async def has_ended():
            return (await client.responses.retrieve(response.id)).status == "incomplete"

        await wait_until(has_ended)
        assert (await client.responses.retrieve(response.id)).output_text == "one two"


async def test_a_response_goes_on_when_its_client_leaves(router, new_store):
    async with serving(router, new_store()) as client:
        stream = await client.responses.create(**ASK, stream=True)
        created = await anext(stream)
        submit = await router.scheduler.submits.get()
        await stream.close()
        await answered(router, submit, "one two")
        events = await client.responses.retrieve(created.response.id, stream=True)
        texts = [e.delta async for e in events if e.type == "response.output_text.delta"]
        assert "".join(texts) == "one two"
        assert router.scheduler.cancels.empty()


async def test_a_stream_continues_after_an_event_without_loss_or_repeat(router, new_store):
    async with serving(router, new_store()) as client:
        stream = await client.responses.create(**ASK, stream=True)
        submit = await router.scheduler.submits.get()
        await answered(router, submit, "one two three", end=False)
        first = [await anext(stream) for _ in range(6)]
        await stream.close()
        await router.scheduler.step(finished={submit.first_seq_key: LENGTH})
        response_id = first[0].response.id
        whole = [e async for e in await client.responses.retrieve(response_id, stream=True)]
        for position in range(len(whole)):
            rest = await client.responses.retrieve(
                response_id, stream=True, starting_after=position
            )
            assert [e async for e in rest] == whole[position + 1 :]
        assert first == whole[:6]


async def test_a_turn_goes_on_after_its_router_was_killed(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True, temperature=0.9)
        submit = await router.scheduler.submits.get()
        tokens = await answered(router, submit, "one two", end=False)

        async def has_tokens():
            return bool(await client.turns.store.events(response.id))

        await wait_until(has_tokens)
        await killed(client)
        await client.turns.store.database.run(
            lambda cursor, _: cursor.execute("UPDATE turns SET lease_until = 0") and None
        )
    async with serving(router, new_store()) as client:
        again = await router.scheduler.submits.get()
        (so_far,) = again.outputs
        assert list(memoryview(so_far.token_ids).cast("i")) == list(tokens)
        assert again.sampling.seed == submit.sampling.seed
        assert again.prompt_token_ids == submit.prompt_token_ids
        whole = await client.responses.retrieve(response.id, stream=True)
        await answered(router, again, " three")
        texts = [e.delta async for e in whole if e.type == "response.output_text.delta"]
        assert "".join(texts) == "one two three"
        assert (await client.responses.retrieve(response.id)).usage.output_tokens == len(
            router.tokens("one two") + router.tokens(" three")
        )


async def test_a_turn_whose_last_token_was_kept_has_ended(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK | {"max_output_tokens": 2}, background=True)
        submit = await router.scheduler.submits.get()
        await router.scheduler.step({submit.first_seq_key: router.tokens("one two")[:2]})

        async def has_tokens():
            return bool(await client.turns.store.events(response.id))

        await wait_until(has_tokens)
        await killed(client)
        await client.turns.store.write(TurnChanges(released=[response.id]))
    async with serving(router, new_store()) as client:
        stream = await client.responses.retrieve(response.id, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        assert router.scheduler.submits.empty()


async def test_a_drain_leaves_what_no_client_reads_to_the_next_start(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        await router.scheduler.submits.get()
        await client.turns.drain()
    async with serving(router, new_store()) as client:
        await answered(router, await router.scheduler.submits.get(), "one")  # without a wait
        events = [e async for e in await client.responses.retrieve(response.id, stream=True)]
        assert events[-1].response.output_text == "one"


async def test_a_conversation_goes_on_from_the_response_before(router, new_store):
    async with serving(router, new_store()) as client:
        previous = None
        prompts = []
        for said, answer in (("A", "one"), ("B", "two"), ("C", "three")):
            asking = asyncio.create_task(
                client.responses.create(model="tiny", input=said, previous_response_id=previous)
            )
            submit = await router.scheduler.submits.get()
            prompts.append(list(memoryview(submit.prompt_token_ids).cast("i")))
            await answered(router, submit, answer)
            previous = (await asking).id
        text = "".join(map(router.inference.text.token_text, prompts[-1]))
        assert text.endswith(
            "user: A\nassistant: one\nuser: B\nassistant: two\nuser: C\nassistant:"
        )
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            await client.responses.create(**ASK, previous_response_id="resp_unknown")


async def test_a_conversation_goes_on_after_a_call_that_broke_off(router, new_store, monkeypatch):
    template = ChatTemplate(
        "{# <tool_call> #}{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}"
        "{% for call in m.tool_calls %}{% for key, value in call.function.arguments.items() %}"
        "{{ key }}={{ value }}{% endfor %}{% endfor %};{% endfor %}",
        {},
    )
    monkeypatch.setattr(router.inference.text, "chat_template", lambda *_: template)
    options = {"model": "tiny", "tools": [{"type": "function", "name": "f"}]}
    async with serving(router, new_store()) as client:
        asking = asyncio.create_task(client.responses.create(input="A", **options))
        submit = await router.scheduler.submits.get()
        call = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": "bro'
        await answered(router, submit, call)
        first = await asking
        assert [item.type for item in first.output] == ["function_call"]
        result = {"type": "function_call_output", "output": "no b"}
        asking = asyncio.create_task(
            client.responses.create(
                input=[{**result, "call_id": first.output[0].call_id}],
                previous_response_id=first.id,
                **options,
            )
        )
        submit = await router.scheduler.submits.get()
        prompt = list(memoryview(submit.prompt_token_ids).cast("i"))
        text = "".join(map(router.inference.text.token_text, prompt))
        assert text == "A;a=1;no b;"
        await answered(router, submit, "one")
        assert (await asking).output_text == "one"


async def test_a_response_is_cancelled_and_keeps_what_it_had(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        submit = await router.scheduler.submits.get()
        stream = await client.responses.retrieve(response.id, stream=True)
        await answered(router, submit, "one two", end=False)
        while (await anext(stream)).type != "response.output_text.delta":
            pass
        cancelled = await client.responses.cancel(response.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "one two")
        assert await router.scheduler.cancels.get() == [submit.first_seq_key]
        assert await client.responses.cancel(response.id) == cancelled
        assert [event async for event in stream][-1].response.status == "cancelled"


async def test_another_router_cancels_a_turn_and_its_owner_stops(router, new_store):
    async with serving(router, new_store()) as owner:
        response = await owner.responses.create(**ASK, background=True)
        submit = await router.scheduler.submits.get()
        async with serving(router, new_store()) as other:
            cancelled = await other.responses.cancel(response.id)
            assert cancelled.status == "cancelled"
            assert await router.scheduler.cancels.get() == [submit.first_seq_key]
            assert (await owner.responses.retrieve(response.id)).status == "cancelled"


async def test_another_router_streams_a_turn(router, new_store, monkeypatch):
    monkeypatch.setattr("router.stored_turns.turns._POLL_S", 0.01)
    async with serving(router, new_store()) as owner, serving(router, new_store()) as other:
        response = await owner.responses.create(**ASK, background=True)
        submit = await router.scheduler.submits.get()
        stream = await other.responses.retrieve(response.id, stream=True)
        await answered(router, submit, "one two", end=False)
        while (await anext(stream)).type != "response.output_text.delta":
            pass
        await router.scheduler.step(finished={submit.first_seq_key: LENGTH})
        elsewhere = [event async for event in stream]
        whole = [e async for e in await owner.responses.retrieve(response.id, stream=True)]
        assert elsewhere == whole[-len(elsewhere) :]


async def test_an_idempotency_key_is_one_turn(router, new_store):
    async with serving(router, new_store()) as client:
        options = {"extra_headers": {"Idempotency-Key": "k"}, "background": True}
        first = await client.responses.create(**ASK, **options)
        assert (await client.responses.create(**ASK, **options)).id == first.id
        with pytest.raises(openai.ConflictError, match="belongs to another request"):
            await client.responses.create(**ASK | {"input": "Else"}, **options)
        await router.scheduler.submits.get()
        assert router.scheduler.submits.empty()
        racing = [
            client.responses.create(
                **ASK, background=True, extra_headers={"Idempotency-Key": "race"}
            )
            for _ in range(2)
        ]
        one, two = await asyncio.gather(*racing)
        assert one.id == two.id


async def test_a_store_that_fails_refuses_what_is_kept_and_nothing_else(
    router, new_store, monkeypatch
):
    store = new_store()
    async with serving(router, store) as client:

        async def fail(_):
            raise StoreError("turns cannot be stored now: database or disk is full")

        monkeypatch.setattr(store, "write", fail)
        with pytest.raises(openai.InternalServerError, match="disk is full") as refused:
            await client.responses.create(**ASK)
        assert refused.value.status_code == 503
        submit = await router.scheduler.submits.get()
        assert await router.scheduler.cancels.get() == [submit.first_seq_key]
        asking = asyncio.create_task(client.responses.create(**ASK, store=False))
        await answered(router, await router.scheduler.submits.get(), "one")
        assert (await asking).output_text == "one"
        monkeypatch.undo()
        asking = asyncio.create_task(client.responses.create(**ASK))
        await answered(router, await router.scheduler.submits.get(), "two")
        assert (await asking).output_text == "two"


async def test_a_reader_gets_the_end_even_if_it_cannot_be_kept_yet(router, new_store, monkeypatch):
    store = new_store()
    async with serving(router, store) as client:
        stream = await client.responses.create(**ASK, stream=True)
        await anext(stream)
        submit = await router.scheduler.submits.get()

        async def fail(_):
            raise StoreError("turns cannot be stored now")

        monkeypatch.setattr(store, "write", fail)
        await answered(router, submit, "one")
        events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        monkeypatch.undo()

        async def is_kept():
            return (await store.find("", events[-1].response.id)).status.has_ended

        await wait_until(is_kept)


async def test_a_failure_that_may_pass_does_not_end_a_turn(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        submit = await router.scheduler.submits.get()
        await router.scheduler.refuse(
            submit.first_seq_key, grpc.StatusCode.UNAVAILABLE, "draining", 0.0
        )
        again = await router.scheduler.submits.get()
        await answered(router, again, "one")
        events = [e async for e in await client.responses.retrieve(response.id, stream=True)]
        assert events[-1].response.output_text == "one"


async def test_a_turn_fails_only_if_no_token_arrives_between_three_failures(router, new_store):
    error = common_pb2.OutputError(code=14, message="lost", retryable=True)
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        for text in ("", "", "one", "", ""):
            key = (await router.scheduler.submits.get()).first_seq_key
            await router.scheduler.step(
                {key: router.tokens(text)},
                finished={key: common_pb2.FINISH_REASON_ERROR},
                error=error,
            )
        events = [e async for e in await client.responses.retrieve(response.id, stream=True)]
        assert events[-1].response.status == "failed"
        assert events[-1].response.output_text == "one"


@pytest.mark.parametrize(
    ("method", "route", "header", "field"),
    [
        ("GET", "responses/r", "x-quire-tenant", "tenant"),
        ("POST", "responses", "Idempotency-Key", "Idempotency-Key"),
    ],
)
async def test_a_header_that_a_database_may_not_take_is_refused(
    router, new_store, method, route, header, field
):
    ask = {"json": ASK | {"background": True}} if method == "POST" else {}
    async with (
        serving(router, new_store()) as client,
        aiohttp.ClientSession(headers={header: "\u00e4"}) as http,
        http.request(method, f"{client.base_url}{route}", **ask) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == field


async def test_a_tenant_finds_its_own_responses_only(router, new_store):
    async with serving(router, new_store()) as client:
        mine = {"X-Quire-Tenant": "me"}
        response = await client.responses.create(**ASK, background=True, extra_headers=mine)
        assert (await router.scheduler.submits.get()).tenant == "me"
        assert (await client.responses.retrieve(response.id, extra_headers=mine)).id == response.id
        for call in (
            client.responses.retrieve(response.id),
            client.responses.cancel(response.id),
            client.responses.delete(response.id),
            client.responses.create(**ASK, previous_response_id=response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_a_call_keeps_the_name_that_its_client_gives_it(router, new_store):
    named = {"X-Request-Id": "mine"}
    async with serving(router, new_store()) as client:
        raw = client.with_raw_response.responses
        for more in ({"background": True}, {"background": True, "stream": True}):
            response = await raw.create(**ASK, **more, extra_headers=named)
            assert response.headers["X-Request-Id"] == "mine"
            await router.scheduler.submits.get()
        response = await raw.create(**ASK, background=True)
        assert response.headers["X-Request-Id"] == response.parse().id


async def test_a_stream_that_cannot_be_resumed_is_refused_by_name(router, new_store):
    resumable = {"X-Quire-Resumable": "true"}
    async with serving(router, new_store()) as client:
        with pytest.raises(openai.BadRequestError, match="X-Quire-Resumable is true"):
            await client.responses.create(**ASK, store=False, extra_headers=resumable)
        kept = await client.responses.create(**ASK, background=True, extra_headers=resumable)
        assert kept.status == "in_progress"


async def test_a_response_that_continues_another_is_pinned(router, new_store):
    async with serving(router, new_store()) as client:
        asking = asyncio.create_task(client.responses.create(**ASK))
        first = await answer_of(router, asking, "one", 0)
        asking = asyncio.create_task(client.responses.create(**ASK, previous_response_id=first.id))
        submit = await router.scheduler.submits.get()
        assert submit.cache_pin_s == 300.0
        key = submit.first_seq_key
        await router.scheduler.step(admitted={key: 2}, pinned={key: 8})
        await answered(router, submit, "two")
        details = (await asking).usage.input_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (2, 6)


async def test_a_response_that_is_deleted_is_unpinned(router, new_store):
    mine = {"X-Quire-Tenant": "me"}
    async with serving(router, new_store()) as client:
        asking = asyncio.create_task(
            client.responses.create(**ASK, prompt_cache_key="k", extra_headers=mine)
        )
        response = await answer_of(router, asking, "one", 0)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(response.id)  # another tenant's
        await client.responses.delete(response.id, extra_headers=mine)
        assert await router.scheduler.unpins.get() == ("me", response.id)
        assert router.scheduler.unpins.empty()


async def test_a_response_that_another_router_deletes_while_it_runs_is_unpinned(router, new_store):
    """It may pin blocks after the deletion, so the router that ran it drops the pins."""
    async with serving(router, new_store()) as client, serving(router, new_store()) as other:
        response = await client.responses.create(**ASK, prompt_cache_key="k", background=True)
        submit = await router.scheduler.submits.get()
        await other.responses.delete(response.id)
        assert await router.scheduler.unpins.get() == ("", response.id)
        await router.scheduler.step(admitted={submit.first_seq_key: 2})
        assert await router.scheduler.unpins.get() == ("", response.id)


async def test_a_large_body_that_is_kept_is_parsed_off_the_loop(router, new_store, monkeypatch):
    threads, validate = set(), ResponseBody.model_validate_json

    def noted(text):
        threads.add(threading.current_thread())
        return validate(text)

    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        monkeypatch.setattr(call, "MAX_PARSED_AT_ONCE_BYTES", 0)
        monkeypatch.setattr(ResponseBody, "model_validate_json", noted)
        assert (await client.responses.retrieve(response.id)).status == "in_progress"
    assert threads
    assert threading.main_thread() not in threads


async def usage_of(store, *by):
    rows = await read_usage(store.database, 0.0, None, by)
    return [(*row.group.values(), row.used) for row in rows]


async def answer_of(router, asking, text, num_cached):
    """Begins and answers the next request."""
    submit = await router.scheduler.submits.get()
    await router.scheduler.step(admitted={submit.first_seq_key: num_cached})
    await answered(router, submit, text)
    return await asking


async def test_what_requests_use_is_counted_whether_they_are_kept_or_not(router, new_store):
    store = new_store()
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Say"}], "max_tokens": 9}
    async with serving(router, store) as client:
        for ask in (
            client.chat.completions.create(**chat),
            client.responses.create(**ASK, store=False),
            client.responses.create(**ASK),
        ):
            answer = await answer_of(router, asyncio.create_task(ask), "one two", 2)
        refused = asyncio.create_task(client.chat.completions.create(**chat))
        await router.scheduler.submits.get()
        refused.cancel()  # before the scheduler begins it
        await router.scheduler.cancels.get()
    usage = answer.usage
    used = Used(3, 3 * usage.input_tokens, 6, 3 * usage.output_tokens, 0)
    assert await usage_of(new_store(), "tenant", "model", "adapter") == [("", "tiny", "", used)]


async def test_a_turn_that_is_begun_twice_is_counted_once(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        submit = await router.scheduler.submits.get()
        await router.scheduler.step(admitted={submit.first_seq_key: 2})
        await answered(router, submit, "one two", end=False)

        async def has_tokens():
            return bool(await client.turns.store.events(response.id))

        await wait_until(has_tokens)
        await killed(client)
        await client.turns.store.write(TurnChanges(released=[response.id]))
    async with serving(router, store := new_store()) as client:
        again = await router.scheduler.submits.get()
        await router.scheduler.step(admitted={again.first_seq_key: 1000})
        whole = await client.responses.retrieve(response.id, stream=True)
        await answered(router, again, " three")
        usage = [event async for event in whole][-1].response.usage
        used = Used(1, usage.input_tokens, usage.input_tokens, usage.output_tokens, 0)
        assert await usage_of(store, "tenant", "key") == [("", "", used)]


async def test_a_response_that_another_router_cancels_is_counted(router, new_store):
    async with serving(router, new_store()) as client:
        response = await client.responses.create(**ASK, background=True)
        submit = await router.scheduler.submits.get()
        tokens = await answered(router, submit, "one two", end=False)

        async def has_tokens():
            return bool(await client.turns.store.events(response.id))

        await wait_until(has_tokens)
        await killed(client)
        await client.responses.cancel(response.id)
        num_prompt = len(submit.prompt_token_ids) // 4
        used = Used(1, num_prompt, 0, len(tokens), 0)
        assert await usage_of(client.turns.store) == [(used,)]

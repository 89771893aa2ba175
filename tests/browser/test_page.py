"""The web page in a real browser, over a real service."""

import contextlib
import http.client
import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, Route, expect

from contract.codec.packing import unpack_int32
from quire.v1 import inference_pb2, kv_pb2
from tests.browser.conftest import ALICE, OPERATOR, give_key
from tests.e2e.service import JSON_TYPE, Service

EVIL = "<img/src=x/onerror=document.title='run'>"
"""A request id that a client may choose."""


@contextlib.contextmanager
def held(service: Service, request_id: str) -> Iterator[None]:
    """Run a sequence during the block; it outlasts many updates of the page."""
    connection = http.client.HTTPConnection(service.router.http, timeout=10)
    body = {"prompt": "hold on to these blocks, please", "max_tokens": 16000, "ignore_eos": True}
    headers = JSON_TYPE | {"Authorization": f"Bearer {OPERATOR}", "X-Request-Id": request_id}
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")  # the sequence runs
    try:
        yield
    finally:
        connection.close()
        response.close()


def test_nothing_is_shown_without_a_key_and_the_key_stays_in_the_tab(locked: Page):
    expect(locked.locator("#key-form")).to_be_visible()
    expect(locked.locator("#status")).to_have_text("needs an API key")
    assert locked.locator(".figure").count() == 0
    locked.fill("#key", "sk-wrong")
    locked.click("#key-form button")
    expect(locked.locator("#key")).to_have_value("")
    expect(locked.locator("#key-form")).to_be_visible()
    give_key(locked, OPERATOR)
    expect(locked.locator("#status")).to_have_text("live")
    assert locked.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]
    assert locked.evaluate("() => sessionStorage.getItem('quire.key')") == OPERATOR


def test_what_is_served_is_not_asked_for_with_every_frame(page: Page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rsplit("/", 1)[-1]))
    while asked.count("load") < 6:
        page.wait_for_timeout(20)
    assert asked.count("models") < 4


def test_the_map_shows_the_holder_of_a_block(page: Page, service: Service):
    with held(service, "job-1"):
        row = page.locator("#sequences tr", has_text="job-1")
        expect(row).to_contain_text("decode")
        expect(page.locator(".tier h3")).to_contain_text("device: 1,024 blocks of 16 tokens")
        block = first_block(service)
        canvas = page.locator("canvas[data-tier=device]")
        box, cell = canvas.bounding_box(), int(canvas.get_attribute("data-cell") or 0)
        assert box is not None
        row_index, column = divmod(block, int(box["width"] // cell))
        canvas.hover(position={"x": (column + 0.5) * cell, "y": (row_index + 0.5) * cell})
        tooltip = page.locator("#tooltip")
        expect(tooltip).to_contain_text(f"device block {block}: held")
        expect(tooltip).to_contain_text("request job-1, output 0")
        expect(tooltip).to_contain_text("table entry 0, tokens 0–15")  # noqa: RUF001 - a range
        before = pixels(page, "canvas[data-tier=device]")
        page.hover("h1")
        expect(tooltip).to_be_hidden()
        assert pixels(page, "canvas[data-tier=device]") != before  # the page outlined its blocks
    expect(row).to_have_count(0)


def test_text_from_clients_is_escaped(page: Page, service: Service):
    with held(service, EVIL):
        cell = page.locator("#sequences td", has_text="onerror")
        expect(cell).to_have_text(EVIL)
        assert page.locator("img").count() == 0
        assert page.title() == "Quire"


def test_the_timeline_says_what_a_step_did(page: Page, service: Service):
    with held(service, "job-2"):
        expect(page.locator("#rates")).to_contain_text("steps/s")
        blank = page.evaluate("() => document.createElement('canvas').toDataURL()")
        assert pixels(page, "#timeline") != blank
        box = page.locator("#timeline").bounding_box()
        assert box is not None
        page.hover("#timeline", position={"x": box["width"] - 3, "y": 100})
        tooltip = page.locator("#tooltip")
        expect(tooltip).to_contain_text(re.compile(r"step \d+: [\d.]+ ms at the worker"))
        expect(tooltip).to_contain_text("1 running, 0 waiting, 0 preempted")


def go_on_after_eos(route: Route) -> None:
    asked = route.request.post_data_json
    route.continue_(post_data=json.dumps({**asked, "ignore_eos": True}))


def test_the_playground_streams_and_stops(page: Page, service: Service):
    page.route("**/v1/completions", go_on_after_eos)
    page.click("#tab-playground")
    page.fill("#prompt", "once upon a time")
    page.fill("#max-tokens", "16000")
    stop = page.locator("#cancel")
    before = stop.bounding_box()
    page.click("#send")
    expect(page.locator(".answer")).to_contain_text(re.compile("once upon a time.{400}", re.DOTALL))
    expect(page.locator("#send")).to_be_disabled()
    assert stop.bounding_box() == before, "the button moves while the answer grows"
    stop.click()
    expect(page.locator("#send")).to_be_enabled()
    service_is_idle(page, service)


def test_the_playground_says_what_it_cost(page: Page):
    page.click("#tab-playground")
    page.fill("#max-tokens", "5")
    page.fill("#temperature", "0")
    page.fill("#stop-string", "never said")
    page.click("#send")
    expect(page.locator("#usage")).to_contain_text(re.compile(r"\d+ prompt tokens .* [1-5] new;"))


def test_the_playground_chats_with_what_was_said_before(page: Page):
    bodies: list[dict[str, object]] = []
    page.on(
        "request",
        lambda request: bodies.append(request.post_data_json) if "chat" in request.url else None,
    )
    page.click("#tab-playground")
    page.select_option("#route", "chat")
    page.fill("#system", "be brief")
    page.fill("#max-tokens", "4")
    for question in ("who is there?", "and now?"):
        page.fill("#prompt", question)
        page.click("#send")
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator(".message", has_text=question)).to_have_count(1)
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert "top_k" not in bodies[0]


def test_a_refusal_is_shown_as_the_router_words_it(page: Page, problems: list[str]):
    page.click("#tab-playground")
    page.fill("#max-tokens", "1000000")
    page.click("#send")
    expect(page.locator(".error")).to_contain_text("max_tokens")
    expect(page.locator("#send")).to_be_enabled()
    problems[:] = [text for text in problems if "status of 400" not in text]


def test_a_tenant_sees_the_load_and_not_the_blocks(locked: Page, problems: list[str]):
    give_key(locked, ALICE)
    expect(locked.locator("#map-note")).to_contain_text("this call is for operators")
    expect(locked.locator("#running")).to_have_text("0")
    assert locked.locator(".tier").count() == 0
    problems[:] = [text for text in problems if "status of 403" not in text]


@pytest.mark.parametrize("attempt", ["inline", "foreign"])
def test_the_browser_runs_nothing_from_elsewhere(page: Page, problems: list[str], attempt: str):
    text, source = ("document.title = 'run'", "") if attempt == "inline" else ("", "//x.test/a.js")
    page.evaluate(
        """([text, source]) => {
            const script = document.createElement("script");
            script.textContent = text;
            if (source) script.src = source;
            document.body.append(script);
        }""",
        [text, source],
    )
    while not any("Content Security Policy" in text for text in problems):
        page.wait_for_timeout(20)
    assert page.title() == "Quire"
    problems.clear()


def first_block(service: Service) -> int:
    """The first block of the only sequence's table."""
    query = kv_pb2.KvQuery(block_tables=True)
    (worker,) = service.stub.DescribeKv(
        inference_pb2.DescribeKvRequest(query=query),
        metadata=[("authorization", f"Bearer {OPERATOR}")],
    ).workers
    (seq,) = worker.sequences
    return int(unpack_int32(seq.device_block_ids, "device_block_ids")[0])


def pixels(page: Page, canvas: str) -> str:
    return page.locator(canvas).evaluate("canvas => canvas.toDataURL()")


def service_is_idle(page: Page, service: Service) -> None:
    """Waits until the page shows that nothing runs any more."""
    page.click("#tab-service")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#num-sequences")).to_have_text("0")
    service.wait_until_ready()

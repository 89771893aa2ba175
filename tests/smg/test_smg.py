"""The real gateway in front of two cells: `openai`'s client uses it while processes are killed.

`make smg-test` installs the gateway (`smg`, from the package index) and runs these tests.
"""

import contextlib
import json
import os

import grpc
import openai
import pytest

from tests.e2e.child import eventually
from tests.smg.gateway import MODEL
from tests.smg.load import complete, kill_in_turn

NUM_KILLS = int(os.environ.get("KILLS", "6"))
pytestmark = [pytest.mark.smg, pytest.mark.timeout(600 + 60 * NUM_KILLS)]

NAME = MODEL.name
PREFIX = "def add(first, second):\n    return first + second\n\n\n" * 3


def test_the_gateway_lists_the_cells_model(client):
    assert [model.id for model in client.models.list()] == [NAME]


def test_answers_are_those_of_the_cell(client, direct):
    for prompt in ("def add(", "import os\n", PREFIX):
        through = complete(client, prompt)  # the gateway adds no special tokens to a prompt
        own = complete(direct, prompt, extra_body={"add_special_tokens": False})
        assert through.choices[0].text == own.choices[0].text
        assert through.choices[0].finish_reason == own.choices[0].finish_reason
        assert through.usage.completion_tokens == own.usage.completion_tokens
        assert through.usage.prompt_tokens == own.usage.prompt_tokens


def test_a_stream_has_the_text_of_the_answer(client):
    whole = complete(client, "class Queue:").choices[0].text
    parts = [chunk.choices[0].text for chunk in complete(client, "class Queue:", stream=True)]
    assert "".join(parts) == whole
    assert len(parts) > 5


def test_a_chat_is_streamed_with_its_usage(client):
    chunks = list(
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "def add("}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage.completion_tokens == 12
    assert {c.finish_reason for chunk in chunks for c in chunk.choices} == {None, "length"}


def test_several_outputs_stops_and_log_probabilities(client):
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "def add("}],
        max_tokens=8,
        n=3,
        seed=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 8
        assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
    text = complete(client, "def add(", 64).choices[0].text
    stop = text[20:24]
    stopped = complete(client, "def add(", 64, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


def test_a_form_holds_through_the_gateway(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "def add("}],
        max_tokens=32,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        },
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["a"], bool)


def test_a_request_that_a_cell_refuses_is_refused(client):
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, "x", 100_000)
    assert caught.value.status_code < 500


def test_the_gateway_knows_the_blocks_and_follows_them(client, gateway, cells):
    def queries():
        return [cell.load().num_prefix_cache_queries for cell in cells]

    faults = ("smg_kv_event_missed_batches_total", "smg_kv_event_parentless_blocks_total")
    before_it = [gateway.metric(name) for name in faults]  # another test kills processes
    stored = gateway.metric("smg_kv_event_blocks_total")
    prompt = "class Tree:\n    def insert(self, key, value):\n        pass\n\n" * 6
    complete(client, prompt, 4)
    eventually(
        lambda: gateway.metric("smg_kv_event_blocks_total") > stored or None,
        "the gateway has heard of the blocks",
    )
    assert [gateway.metric(name) for name in faults] == before_it
    before = queries()
    for number in range(4):
        answer = complete(client, f"{prompt}# {number}\n", 4)
        assert answer.usage.prompt_tokens_details.cached_tokens > 64
    grown = [now - then for now, then in zip(queries(), before, strict=True)]
    assert min(grown) == 0, "all went to the cell that has the prefix"


def test_no_kill_of_a_scheduler_or_worker_loses_a_request(client, cells):
    load = kill_in_turn(client, cells, NUM_KILLS)
    assert load.lost == []
    assert load.num_done >= 12


def test_without_one_router_the_other_cell_serves_and_with_it_both(client, cells):
    """The gateway may lose the streams of a killed router, but no later requests."""
    cells[0].router.kill()
    served = 0
    for number in range(12):  # the gateway notices the router's end when a call fails
        with contextlib.suppress(openai.InternalServerError):
            complete(client, f"def f{number}(", 4)
            served += 1
    assert served >= 8
    cells[0].start_router()
    cells[0].wait_until_ready()

    def reached():
        before = cells[0].load().num_prefix_cache_queries
        for number in range(4):
            complete(client, f"class C{number}_{before}:", 4)
        return cells[0].load().num_prefix_cache_queries > before or None

    cells[0]._channel.close()
    cells[0]._channel = grpc.insecure_channel(cells[0].target)
    eventually(reached, "the gateway uses the router again")

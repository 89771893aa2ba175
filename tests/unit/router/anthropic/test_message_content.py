"""The content of a message does not depend on the pieces of its text."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_fakes import FakeModel, FakeText, spell

from contract.outputs import FinishReason, OutputFinished
from router.http.anthropic.content_events import ContentEvents, collected
from router.text.chat_template import ChatTemplate

PIECES = [
    "<think>", "</think>", "Hm.", "\n\n", "So:", " ", "<tool_call>", "</tool_call>", "\\u00", "é",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "arguments": {"a": ', '"x', "}", "<",
]  # fmt: skip
END = OutputFinished(0, FinishReason.STOP)
MODEL_TEXT = FakeText(FakeModel())
PARSERS = MODEL_TEXT.parsers(ChatTemplate("{{ tools }}<tool_call><think></think>", {}))
SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def events_of(parts, *, has_tools):
    def new_reader():
        return PARSERS.new_reader(SCHEMAS if has_tools else None, has_begun=False)

    content = ContentEvents(new_reader, ())
    return [*(event for part in parts for event in content.push(part)), *content.finish(END)]


def without_ids(blocks):
    return [block | ({"id": ""} if "id" in block else {}) for block in blocks]


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.data(), st.booleans())
def test_any_split_of_a_text_gives_the_same_content(pieces, data, has_tools):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = events_of(parts, has_tools=has_tools)
    assert without_ids(collected(events)) == without_ids(
        collected(events_of([text], has_tools=has_tools))
    )
    # Blocks follow each other, and each delta is within its own.
    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    starts = [index for kind, index in kinds if kind == "start"]
    assert starts == list(range(len(starts)))
    for (kind, index), (next_kind, next_index) in itertools.pairwise(kinds):
        assert (next_kind == "start") == (kind == "stop")
        assert next_index == index + (kind == "stop")


@pytest.mark.parametrize(
    "text",
    [
        "Hi!",
        "<think>Hm.</think>Hi!",
        'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x',
        "",
    ],
)
async def test_the_clients_sum_of_a_stream_is_the_answer_without_one(client, inference, text):
    inference.text.template = ChatTemplate("{{ tools }}<tool_call><think></think>", {})
    inference.script = spell(text)
    ask = {
        "model": "org/tiny",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"name": "add", "input_schema": SCHEMAS["add"]}],
    }
    whole = (await client.messages.create(**ask)).model_dump()
    async with client.messages.stream(**ask) as stream:
        streamed = (await stream.get_final_message()).model_dump()
    for message in (whole, streamed):
        message["id"] = ""
        message["content"] = without_ids(message["content"])
        for block in message["content"]:
            block.pop("parsed_output", None)  # the stream's helper adds it
    assert whole == streamed

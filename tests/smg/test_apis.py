"""Tools, Responses, Messages and vectors, which the gateway makes from a cell's tokens."""

import json

import anthropic
import numpy as np
import pytest

from tests.smg.gateway import MODEL

pytestmark = [pytest.mark.smg, pytest.mark.timeout(600)]

NAME = MODEL.name
MESSAGES = [{"role": "user", "content": "def add("}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def messages(gateway):
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client.messages


def chat(client, messages, max_tokens=64, **fields):
    return client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=max_tokens, temperature=0, **fields
    )


def check_arguments(arguments):
    assert arguments.keys() == {"a", "b"}
    assert all(isinstance(each, bool) for each in arguments.values())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_tool_is_called_with_arguments_of_its_schema_and_its_result_is_read(client, choice):
    answer = chat(client, MESSAGES, tools=[TOOL], tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "add"
    check_arguments(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "True"}
    called = answer.message.model_dump(exclude_none=True)
    after = chat(client, [*MESSAGES, called, result], tools=[TOOL])
    assert after.usage.prompt_tokens > chat(client, MESSAGES).usage.prompt_tokens
    assert after.choices[0].message.content


def test_a_response_continues_the_one_before_it(client):
    def respond(text, previous=None):
        return client.responses.create(
            model=NAME,
            input=text,
            max_output_tokens=16,
            temperature=0,
            previous_response_id=previous,
        )

    first = respond("def add(")
    second = respond("class Queue:", first.id)
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "class Queue:"},
    ]
    answer = chat(client, conversation, 16)
    assert second.previous_response_id == first.id
    assert second.output_text == answer.choices[0].message.content
    assert second.usage.input_tokens == answer.usage.prompt_tokens > first.usage.total_tokens


def test_a_streamed_response_has_the_text_of_the_answer(client):
    fields = {"model": NAME, "input": "import os", "max_output_tokens": 16, "temperature": 0}
    events = [*client.responses.create(**fields, stream=True)]
    parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(parts) == client.responses.create(**fields).output_text
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_messages_answers_streams_counts_and_calls_tools(client, messages):
    fields = {
        "model": NAME,
        "max_tokens": 16,
        "messages": MESSAGES,
        "extra_body": {"temperature": 0},
    }
    answer = messages.create(**fields)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].text == chat(client, MESSAGES, 16).choices[0].message.content
    with messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
    counted = messages.count_tokens(model=NAME, messages=MESSAGES)
    assert counted.input_tokens == answer.usage.input_tokens
    tools = [{"name": "add", "input_schema": SCHEMA}]
    called = messages.create(
        **fields | {"max_tokens": 64}, tools=tools, tool_choice={"type": "any"}
    )
    assert called.stop_reason == "tool_use"
    check_arguments(called.content[0].input)


def test_vectors_are_those_of_the_cell(client, direct):
    def vector(client):
        answer = client.embeddings.create(model=NAME, input="def add(a, b):")
        return np.array(answer.data[0].embedding), answer.usage.prompt_tokens

    (through, num_tokens), (own, num_own_tokens) = vector(client), vector(direct)
    assert num_tokens == num_own_tokens
    np.testing.assert_allclose(through, own, atol=1e-6)

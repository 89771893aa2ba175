"""/v1/responses, as the unmodified `openai` package uses it; every event fits OpenAI's schema."""

import json
from types import MappingProxyType

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai_fakes import delta, play, spell

from contract.errors import TooBusyError, UnavailableError
from contract.outputs import FinishReason, OutputDelta, OutputError, OutputFinished, Usage
from router.text.chat_template import ChatTemplate

TOOL = MappingProxyType(
    {
        "type": "function",
        "name": "weather",
        "description": "Look up the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def client(server):
    host, port = server
    async with openai.AsyncOpenAI(
        base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=None
    ) as client:
        yield client


async def events_of(http, **body):
    """Streams a response; checks each event against OpenAI's schema, and their numbers."""
    async with http.post("/v1/responses", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    events = []
    for block in text.split("\n\n")[:-1]:
        if block == ":":
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        if "response" in event:
            Response.model_validate(event["response"])
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


async def test_a_response_in_one_piece(client, inference):
    response = await client.responses.create(
        model="org/tiny",
        input="Say",
        instructions="Be brief",
        metadata={"a": "b"},
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.25,
        user="me",
    )
    assert (response.status, response.output_text) == ("completed", "Hi!")
    assert response.id.startswith("resp_")
    assert response.model == "org/tiny"
    assert (response.instructions, response.metadata) == ("Be brief", {"a": "b"})
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.25, 9)
    usage = response.usage
    assert usage.output_tokens == 3
    assert usage.total_tokens == usage.input_tokens + 3
    assert usage.input_tokens_details.cached_tokens == 1
    assert response.model_extra["store"] is False
    (request,) = inference.requests
    assert request.prompt == "<system>Be brief<user>Say<assistant>"
    assert request.request_id == response.id
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 9)


async def test_a_stream_has_openai_s_events_in_order(http):
    events = await events_of(http, input="Say")
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == "Hi!"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


async def test_the_events_do_not_depend_on_how_tokens_arrive(http, inference):
    async def stream_of(*parts):
        offset, deltas = 0, []
        for part in parts:
            deltas.append(OutputDelta(0, offset, tuple(map(ord, part)), "not read"))
            offset += len(part)
        inference.script = play(
            [*deltas, OutputFinished(0, FinishReason.STOP), Usage(3, offset, 0)]
        )
        events = await events_of(http, input="x", tools=[dict(TOOL)])
        own = events[0]["response"]["id"].removeprefix("resp_")
        return json.loads(json.dumps(events).replace(own, "ID"))

    text = f"Let me look.{CALL}"
    whole, single = await stream_of(text), await stream_of(*text)
    for events in (whole, single):
        for event in events:
            if "response" in event:
                event["response"] |= {"created_at": 0, "completed_at": 0}
    assert whole == single
    assert whole[-1]["response"]["output"][1]["call_id"] == "call_ID0"


async def test_the_streaming_helper_collects_text(client):
    async with client.responses.stream(model="org/tiny", input="Say") as stream:
        text = "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])
        response = await stream.get_final_response()
    assert text == response.output_text == "Hi!"


async def test_a_call_streams_its_arguments_as_they_come(client, inference):
    inference.script = spell(f"Let me look.\n{CALL}\n{CALL}")
    async with client.responses.stream(
        model="org/tiny", input="Weather?", tools=[dict(TOOL)]
    ) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert len(arguments) > 10
    said, first, second = response.output
    assert (said.type, said.content[0].text.strip()) == ("message", "Let me look.")
    assert first.name == second.name == "weather"
    assert json.loads(first.arguments) == json.loads(second.arguments) == {"city": "Oslo"}
    assert first.call_id != second.call_id
    (_, kwargs) = inference.text.chats[0]
    assert kwargs["tools"][0]["function"]["name"] == "weather"


async def test_thinking_is_an_item_of_its_own(http, inference):
    inference.text.template = type(inference.text.template)("<think></think>", {})
    inference.script = spell("<think>\nHm.\n</think>\n\nYes")
    events = await events_of(http, input="x", include=["reasoning.encrypted_content"])
    thought, said = events[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"] == "Yes"
    usage = events[-1]["response"]["usage"]["output_tokens_details"]
    assert 3 <= usage["reasoning_tokens"] < 20
    # A client that sends back only the sealed thinking gets it into the next prompt.
    sealed = {"type": "reasoning", "id": "rs_1", "summary": []} | {
        "encrypted_content": thought["encrypted_content"]
    }
    items = [{"role": "user", "content": "x"}, sealed, said, {"role": "user", "content": "y"}]
    await events_of(http, input=items)
    messages, _ = inference.text.chats[-1]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert (messages[1]["reasoning_content"], messages[1]["content"]) == ("Hm.", "Yes")


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
async def test_a_summary_may_be_asked_for(client, summary):
    response = await client.responses.create(
        model="org/tiny", input="x", reasoning={"summary": summary}
    )
    assert response.reasoning.summary == summary


async def test_items_become_the_messages_of_a_chat(client, inference):
    await client.responses.create(
        model="org/tiny",
        instructions="A",
        input=[
            {"role": "developer", "content": "B"},
            {"role": "user", "content": [{"type": "input_text", "text": "C"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "D", "annotations": []}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "1", "output": "E"},
            {
                "type": "function_call_output",
                "call_id": "2",
                "output": [{"type": "input_text", "text": "F"}],
            },
        ],
    )
    messages, _ = inference.text.chats[0]
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "A\n\nB"),
        ("user", "C"),
        ("assistant", "D"),
        ("tool", "E"),
        ("tool", "F"),
    ]
    calls = messages[2]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {}},
    ]


async def test_a_conversation_goes_on_after_a_call_that_broke_off(client, inference):
    inference.script = spell(CALL[: CALL.index("Oslo") + 2], FinishReason.LENGTH)
    question = {"role": "user", "content": "Weather?"}
    first = await client.responses.create(model="org/tiny", input=[question], tools=[dict(TOOL)])
    (call,) = first.output
    assert (call.status, call.arguments) == ("incomplete", '{"city":"Os')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "no such city"}
    await client.responses.create(model="org/tiny", input=[question, call.model_dump(), result])
    (_, before, _), _ = inference.text.chats[-1]
    assert before["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}


HOSTED = {"type": "web_search", "external_web_access": False}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hosted_tool_that_agents_offer_unasked_is_left_out(http, inference, stream):
    inference.script = spell(CALL)
    body = {"input": "x", "tools": [HOSTED, TOOL, {"type": "image_generation"}], "stream": stream}
    async with http.post("/v1/responses", json=json.loads(json.dumps(body, default=dict))) as told:
        assert told.headers["X-Quire-Tools-Left-Out"] == "web_search, image_generation"
        text = await told.text()
    response = json.loads(text.split("data: ")[-1])
    response = response.get("response", response)
    assert [tool["name"] for tool in response["tools"]] == ["weather"]
    (_, kwargs) = inference.text.chats[0]
    assert [tool["function"]["name"] for tool in kwargs["tools"]] == ["weather"]
    async with http.post("/v1/responses", json={"input": "x"}) as told:
        assert "X-Quire-Tools-Left-Out" not in told.headers


async def test_a_function_of_a_group_is_called_by_group_and_name(client, http, inference):
    inference.script = spell(CALL.replace("weather", "agents__weather"))
    tool = {**TOOL, "description": "Look it up"}
    group = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [tool]}
    events = await events_of(http, input="x", tools=[group, dict(TOOL)])
    (call,) = events[-1]["response"]["output"]
    assert (call["namespace"], call["name"]) == ("agents", "weather")
    assert events[-1]["response"]["tools"][0]["tools"][0]["name"] == "weather"
    (_, kwargs) = inference.text.chats[0]
    shown = [(f["name"], f["description"]) for f in (t["function"] for t in kwargs["tools"])]
    assert shown == [
        ("agents__weather", "Agents.\n\nLook it up"),
        ("weather", "Look up the weather"),
    ]
    await client.responses.create(model="org/tiny", input=[{"role": "user", "content": "x"}, call])
    (_, before), _ = inference.text.chats[-1]
    assert before["tool_calls"][0]["function"]["name"] == "agents__weather"


async def test_text_has_the_form_of_a_schema(client, inference):
    class Answer(pydantic.BaseModel):
        yes: bool

    inference.script = spell('{"yes": true}')
    response = await client.responses.parse(model="org/tiny", input="x", text_format=Answer)
    assert response.output_parsed == Answer(yes=True)
    schema = inference.requests[0].sampling.structured.json_schema
    assert schema["properties"]["yes"]["type"] == "boolean"


async def test_log_probabilities_on_request(client, http, inference):
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await client.responses.create(model="org/tiny", input="x", **options)
    logprobs = response.output[0].content[0].logprobs
    assert [entry.token for entry in logprobs] == list("Hi!")
    assert [top.token for top in logprobs[0].top_logprobs] == ["A", "B"]
    assert inference.requests[0].sampling.logprobs == 2
    events = await events_of(http, input="x", **options)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [e["logprobs"][0]["token"] for e in deltas] == list("Hi!")


async def test_an_answer_that_was_cut_is_incomplete(client, http, inference):
    inference.script = spell("Hi!", FinishReason.LENGTH)
    response = await client.responses.create(model="org/tiny", input="x")
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert kinds(await events_of(http, input="x"))[-1] == "incomplete"


async def test_white_space_between_items_belongs_to_none(http, inference):
    inference.script = spell(f"\n{CALL}\n")
    events = await events_of(http, input="x", tools=[dict(TOOL)])
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["function_call"]
    inference.script = spell("\n\n")
    (item,) = (await events_of(http, input="x"))[-1]["response"]["output"]
    assert item["content"][0]["text"] == "\n\n"


async def test_a_refusal_has_its_status_even_for_a_stream(client, inference):
    inference.script = play([TooBusyError("the queue is full")])
    with pytest.raises(openai.RateLimitError, match="the queue is full"):
        await client.responses.create(model="org/tiny", input="x", stream=True)


async def test_a_stream_that_breaks_ends_with_a_failed_response(http, inference):
    inference.script = play([delta("a"), UnavailableError("the scheduler is lost")])
    events = await events_of(http, input="x")
    assert kinds(events)[-1] == "failed"
    response = events[-1]["response"]
    assert response["error"] == {"code": "server_error", "message": "the scheduler is lost"}
    assert response["output"][0]["content"][0]["text"] == "a"
    error = OutputError(14, "the worker is lost", retryable=True)
    inference.script = play(
        [delta("a"), OutputFinished(0, FinishReason.ERROR, error=error), Usage(3, 1, 0)]
    )
    assert (await events_of(http, input="x"))[-1]["response"]["status"] == "failed"
    async with http.post("/v1/responses", json={"input": "x"}) as response:
        assert response.status == 503


async def test_truncation_drops_the_oldest_turns(client, inference):
    turns = [
        {"role": role, "content": f"{i}" * 8} for i in range(5) for role in ("user", "assistant")
    ]
    await client.responses.create(
        model="org/tiny",
        instructions="S",
        input=[*turns, {"role": "user", "content": "now"}],
        truncation="auto",
        max_output_tokens=2,
    )
    prompt = inference.requests[0].prompt
    assert prompt.startswith("<system>S<user>4")
    assert prompt.endswith("<user>now<assistant>")


def called(name):
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def result(name):
    return {"type": "function_call_output", "call_id": name, "output": name}


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (
            [called("1"), result("1"), called("2"), result("2"), called("3"), result("3")],
            "<assistant><tool>2<assistant><tool>3",
        ),
        (  # calls together, a message between call and result, a call without a result
            [
                *(called("0"), called("1"), called("2"), {"role": "user", "content": "wait"}),
                *(result("2"), result("1"), {"role": "assistant", "content": "now"}),
                *(called("3"), result("3")),
            ],
            "<assistant>now<tool>3",
        ),
    ],
)
async def test_truncation_drops_the_oldest_steps_of_a_long_turn(client, inference, steps, kept):
    user = [{"role": "user", "content": text} for text in ("old" * 9, "Do")]
    await client.responses.create(
        model="org/tiny", input=[*user, *steps], truncation="auto", max_output_tokens=1
    )
    assert inference.requests[-1].prompt == f"<user>Do{kept}<assistant>"


@pytest.mark.parametrize(
    ("body", "field", "problem"),
    [
        ({"input": []}, "input", "has 0 items"),
        ({"input": 3}, "input", "must be a string or a list"),
        ({"input": ["x"]}, "input[0]", "must be an object"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [{"role": "user", "content": "x", "a": 1}]}, "input[0].a", "no such field"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", "needs"),
        ({"input": "x", "background": True, "store": False}, "background", "needs store"),
        ({"input": "x", "stream_options": {}}, "stream_options", "needs stream"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "tools"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA="}]},
            "input[0].encrypted_content",
            "not written by this service",
        ),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "not"),
        ({"input": "x", "tools": {}}, "tools", "must be a list"),
        ({"input": "x", "tools": ["f"]}, "tools[0]", "must be an object"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "a b"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"a": 1}]}]},
            "tools[0].tools[0].type",
            "is missing",
        ),
        ({"input": "x", "tools": [HOSTED] * 129}, "tools", "has 129 entries"),
        (
            {"input": "x", "tools": [HOSTED, {**TOOL}, {**TOOL}]},
            "tools[2].name",
            "another tool has this",
        ),
        (
            {
                "input": "x",
                "tools": [
                    {"type": "function", "name": "a__b"},
                    {"type": "namespace", "name": "a", "tools": [{**TOOL, "name": "b"}]},
                ],
            },
            "tools[1].tools[0].name",
            'makes the name "a__b"; another tool has this name',
        ),
        (
            {"input": "x", "tools": [HOSTED], "tool_choice": "required"},
            "tool_choice",
            "needs tools",
        ),
        (
            {
                "input": "x",
                "tools": [
                    {
                        "type": "namespace",
                        "name": "n" * 64,
                        "tools": [{"type": "function", "name": "f" * 64}],
                    }
                ],
            },
            "tools[0].tools[0].name",
            "at most 128 characters",
        ),
        (
            {
                "input": "x",
                "tools": [
                    {
                        "type": "namespace",
                        "name": f"n{i}",
                        "tools": [{"type": "function", "name": f"f{j}"} for j in range(65)],
                    }
                    for i in range(2)
                ],
            },
            "tools",
            "has 130 functions",
        ),
    ],
)
async def test_a_wrong_field_is_named(http, body, field, problem):
    async with http.post("/v1/responses", json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == field
    assert problem in error["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, 'input[0].type is "item_reference"'),
        ({"input": "x", "conversation": "c"}, 'conversation is "c"'),
        ({"input": "x", "max_tool_calls": 3}, "max_tool_calls is 3"),
        ({"input": "x", "text": {"verbosity": "low"}}, 'verbosity is "low"'),
        ({"input": "x", "reasoning": {"effort": "low"}}, 'reasoning_effort is "low"'),
        ({"input": "x", "tools": [{"type": "file_search"}]}, 'tools[0].type is "file_search"'),
        ({"input": "x", "tools": [{"type": ["function"]}]}, 'tools[0].type is ["function"]'),
        (
            {"input": "x", "tools": [{"type": "function", "name": "f", "defer_loading": True}]},
            "tools[0].defer_loading is true",
        ),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, '{"type":"web_search"}'),
        ({"input": "x", "reasoning": {"generate_summary": "long"}}, 'generate_summary is "long"'),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(http, body, named):
    async with http.post("/v1/responses", json=body) as response:
        assert response.status == 400
        assert named in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("tools", "path"),
    [
        ([TOOL, {**TOOL, "name": "strict", "strict": True}], r"tools\[1\]"),
        (
            [
                {"type": "web_search"},
                {"type": "namespace", "name": "group", "tools": [{**TOOL, "strict": True}]},
            ],
            r"tools\[1\]\.tools\[0\]",
        ),
    ],
)
async def test_a_refused_tool_has_the_name_of_this_api(client, inference, tools, path):
    inference.text.template = ChatTemplate("{{ tools }}<tool_call>", {})
    with pytest.raises(openai.BadRequestError, match=rf"\b{path}\.strict is true"):
        await client.responses.create(model="org/tiny", input="Hello", tools=tools)
    assert not inference.requests

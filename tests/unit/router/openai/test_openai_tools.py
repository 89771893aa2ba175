"""Tools with the `openai` package: the model's prompt and grammar, and the client's result."""

import json

import openai
import pytest
from openai_fakes import spell

from contract.errors import InvalidArgumentError
from contract.outputs import FinishReason
from router.parsers.choosing import OutputParsers
from router.text.chat_template import ChatTemplate
from router.text.structured_output import to_grammar

HELLO = [{"role": "user", "content": "Hello"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}
NAMED = {"type": "function", "function": {"name": "add"}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
STRICT_NOW = {"type": "function", "function": {"name": "now", "strict": True}}
UNKNOWN = ChatTemplate("{{ tools }}", {})
"""A template that writes calls in an unknown syntax."""
GPT_OSS = ("start", "channel", "constrain", "message", "end", "return", "call")
GPT_OSS_IDS = {f"<|{name}|>": 100 + i for i, name in enumerate(GPT_OSS)}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
async def client(server):
    host, port = server
    async with openai.AsyncOpenAI(
        base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=None
    ) as client:
        yield client


async def streamed(client, **options):
    """The deltas of a choice, merged: content, calls, finish reason."""
    content, calls, reasons = "", [], []
    async for chunk in await client.chat.completions.create(
        model="org/tiny", messages=HELLO, stream=True, **options
    ):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for piece in choice.delta.tool_calls or ():
            if piece.id is not None:
                assert (piece.index, piece.type) == (len(calls), "function")
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
    assert set(reasons[:-1]) <= {None}
    return content, calls, reasons[-1]


async def test_tools_are_shown_to_the_template_as_they_were_sent(client, inference):
    for choice in ("none", "auto", openai.omit):
        await client.chat.completions.create(
            model="org/tiny", messages=HELLO, tools=[ADD, NOW], tool_choice=choice
        )
    assert [kwargs for _, kwargs in inference.text.chats] == [{"tools": [ADD, NOW]}] * 3
    assert [request.sampling.structured for request in inference.requests] == [None] * 3


async def test_a_conversation_with_calls_can_be_sent_back(client, inference):
    inference.script = spell(CALL)
    options = {"model": "org/tiny", "tools": [ADD]}
    first = await client.chat.completions.create(messages=HELLO, **options)
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    await client.chat.completions.create(messages=[*HELLO, message.model_dump(), result], **options)
    (_, sent_call, sent_result), _ = inference.text.chats[-1]
    assert sent_result == result
    assert sent_call == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        ],
    }


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ('{"a": [1, {"b": 2', {"a": [1, {"b": 2}]}),
        ('{"a":', {}),
        ('{"a": oops}', {}),
        ("", {}),
        ("1", {}),
    ],
)
async def test_of_a_broken_call_the_template_sees_what_is_whole(client, inference, sent, shown):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": sent}}
    result = {"role": "tool", "tool_call_id": "1", "content": "bad arguments"}
    await client.chat.completions.create(
        model="org/tiny", messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, result]
    )
    (_, before, _), _ = inference.text.chats[-1]
    assert before["tool_calls"][0]["function"] == {"name": "add", "arguments": shown}


async def test_a_call_with_too_many_parts_is_refused_by_name(client):
    arguments = '{"a": [' + "[]," * 17_000
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(openai.BadRequestError, match=r"arguments has 17002 objects and lists"):
        await client.chat.completions.create(
            model="org/tiny", messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]
        )


async def test_a_call_that_the_model_makes_is_told_apart_from_content(client, inference):
    inference.script = spell(f"So:\n{CALL}\n{CALL}")
    answer = await client.chat.completions.create(
        model="org/tiny", messages=HELLO, tools=[ADD], n=2
    )
    for choice in answer.choices:
        assert (choice.message.content, choice.finish_reason) == ("So:", "tool_calls")
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
            ("add", '{"a":1}')
        ] * 2
    assert await streamed(client, tools=[ADD]) == ("So:", [["add", '{"a":1}']] * 2, "tool_calls")


async def test_without_a_call_the_answer_is_as_without_tools(client):
    answer = await client.chat.completions.create(model="org/tiny", messages=HELLO, tools=[ADD])
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hi!", "stop")
    assert choice.message.tool_calls is None
    assert await streamed(client, tools=[ADD]) == ("Hi!", [], "stop")


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_is_in_the_models_own_syntax(client, inference, choice):
    inference.script = spell(f"{CALL}\n{CALL}" if choice == "required" else CALL)
    calls = [["add", '{"a":1}']] * (2 if choice == "required" else 1)
    options = {"tools": [ADD, NOW], "tool_choice": choice}
    assert await streamed(client, **options) == ("", calls, "tool_calls")
    structured = inference.requests[-1].sampling.structured
    assert structured.form == "grammar"
    grammar = to_grammar(structured).grammar
    assert ("now" in grammar) == (choice == "required")
    assert (")*" in grammar) == (choice == "required")


async def test_a_strict_function_is_called_as_its_schema_says(client, inference):
    inference.text.marker_ids = {"<tool_call>": 7}
    await client.chat.completions.create(model="org/tiny", messages=HELLO, tools=[STRICT])
    (request,) = inference.requests
    assert request.sampling.structured.grammar.startswith("start: <[^7]>*")
    assert not request.skip_special_tokens, "the reader needs the marker"


async def test_a_strict_function_of_gpt_oss_may_be_called(client, inference):
    inference.text.marker_ids = GPT_OSS_IDS
    inference.text.template = ChatTemplate("{{ tools }}<|channel|><|message|>", {})
    header = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    inference.script = spell(f'{header}{{"a": 1}}<|call|>')
    answer = await client.chat.completions.create(model="org/tiny", messages=HELLO, tools=[STRICT])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    (request,) = inference.requests
    assert "to=functions." in to_grammar(request.sampling.structured).grammar


FORM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORMED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}}


async def test_an_answer_with_tools_is_a_call_or_has_a_form(client, inference):
    for output, found in (
        (CALL, ("", [["add", '{"a":1}']], "tool_calls")),
        ('{"sum": 1}', ('{"sum": 1}', [], "stop")),
    ):
        inference.script = spell(output)
        assert await streamed(client, tools=[ADD], **FORMED) == found
        grammar = to_grammar(inference.requests[-1].sampling.structured).grammar
        assert "sum" in grammar
        assert "add" in grammar


async def test_a_form_needs_a_known_grammar_of_calls(client, inference, monkeypatch):
    parsers = OutputParsers(lambda _: None, None, lambda _: None, lambda _: False)
    monkeypatch.setattr(inference.text, "parsers", lambda _: parsers)  # of a user's class
    with pytest.raises(openai.BadRequestError, match="the grammar of its calls is unknown"):
        await client.chat.completions.create(
            model="org/tiny", messages=HELLO, tools=[ADD], **FORMED
        )


@pytest.mark.parametrize(
    "template", ['{{ tools }}{"name": function name, "parameters":', "{{ tools }}[func_name1("]
)
async def test_a_strict_function_needs_no_marker(client, inference, template):
    inference.text.template = ChatTemplate(template, {})
    await client.chat.completions.create(model="org/tiny", messages=HELLO, tools=[STRICT])
    assert to_grammar(inference.requests[-1].sampling.structured).grammar


async def test_a_form_has_no_effect_on_a_forced_call(client, inference):
    inference.script = spell(CALL)
    options = {"tools": [ADD], "tool_choice": "required", **FORMED}
    assert await streamed(client, **options) == ("", [["add", '{"a":1}']], "tool_calls")
    assert "sum" not in inference.requests[-1].sampling.structured.grammar


async def test_gpt_oss_thinks_before_a_call_or_an_answer_with_a_form(client, inference):
    inference.text.marker_ids = GPT_OSS_IDS
    inference.text.template = ChatTemplate("{{ tools }}<|channel|><|message|>", {})
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    inference.script = spell(f'{thought}<|channel|>final<|message|>{{"sum": 1}}')
    options = {"model": "org/tiny", "messages": HELLO, **FORMED}
    for tools in ({}, {"tools": [ADD]}):
        answer = await client.chat.completions.create(**options, **tools)
        message = answer.choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", '{"sum": 1}')
        (request,) = inference.requests[-1:]
        grammar = to_grammar(request.sampling.structured, request.before_form).grammar
        assert "analysis" in grammar
    inference.script = spell(
        f'{thought}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}'
    )
    for choice in ("auto", "required"):
        answer = await client.chat.completions.create(**options, tools=[ADD], tool_choice=choice)
        message = answer.choices[0].message
        assert (message.reasoning, len(message.tool_calls)) == ("Hm.", 1)
        (request,) = inference.requests[-1:]
        assert to_grammar(request.sampling.structured, request.before_form).grammar


async def test_tools_that_are_not_to_be_called_need_no_template(client, inference):
    inference.text.template = ChatTemplate("{{ messages }}", {})
    await client.chat.completions.create(
        model="org/tiny", messages=HELLO, tools=[ADD], tool_choice="none"
    )
    assert [kwargs for _, kwargs in inference.text.chats] == [{}]


async def test_the_streaming_helper_gathers_calls(client, inference):
    inference.script = spell(f"So:\n{CALL}\n{CALL}")
    async with client.chat.completions.stream(
        model="org/tiny", messages=HELLO, tools=[ADD]
    ) as stream:
        events = [event async for event in stream]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [("add", '{"a":1}')] * 2
    message = (await stream.get_final_completion()).choices[0].message
    assert (message.content, len(message.tool_calls)) == ("So:", 2)


async def test_where_calls_are_not_wanted_tags_are_content(client, inference):
    inference.script = spell(CALL)
    for options in ({}, {"tools": [ADD], "tool_choice": "none"}):
        assert await streamed(client, **options) == (CALL, [], "stop")


async def test_a_call_that_is_to_be_alone_ends_the_output(client, inference):
    for parallel in (True, False):
        await client.chat.completions.create(
            model="org/tiny", messages=HELLO, tools=[ADD], stop="x", parallel_tool_calls=parallel
        )
    assert [request.stop for request in inference.requests] == [("x",), ("x", "</tool_call>")]


async def test_a_call_without_a_marker_at_its_end_is_alone_by_the_grammar(client, inference):
    inference.text.template = ChatTemplate("{{ tools }}[TOOL_CALLS][ARGS]", {})
    inference.text.marker_ids = {"[TOOL_CALLS]": 5, "[ARGS]": 6}
    for options in (
        {"tools": [ADD, STRICT_NOW]},
        {"tools": [ADD], "parallel_tool_calls": False},
    ):
        await client.chat.completions.create(model="org/tiny", messages=HELLO, **options)
    several, alone = (request.sampling.structured.grammar for request in inference.requests)
    assert several.startswith("start: <[^5]>* (section <[^5]>*)*")
    assert alone.startswith("start: <[^5]>* section?")
    assert [request.stop for request in inference.requests] == [(), ()]


async def test_a_stop_string_that_ends_a_call_is_read_with_it(client, inference):
    inference.text.template = ChatTemplate("{{ tools }}<function=<parameter=", {})
    inference.script = spell(
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n",
        stop_string="</tool_call>",
    )
    options = {"tools": [ADD], "parallel_tool_calls": False}
    assert await streamed(client, **options) == ("", [["add", '{"a":1}']], "tool_calls")


async def test_a_stop_string_that_is_part_of_the_text_is_read_once(client, inference):
    inference.script = spell(CALL, stop_string="</tool_call>")
    options = {"tools": [ADD], "parallel_tool_calls": False}
    options["extra_body"] = {"include_stop_str_in_output": True}
    assert await streamed(client, **options) == ("", [["add", '{"a":1}']], "tool_calls")


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_of_one_function_is_its_arguments(client, inference, choice):
    inference.text.template = UNKNOWN
    inference.script = spell('{"a": 1}')
    options = {"tools": [ADD], "tool_choice": choice}
    assert await streamed(client, **options) == ("", [["add", '{"a": 1}']], "tool_calls")
    answer = await client.chat.completions.create(model="org/tiny", messages=HELLO, **options)
    message = answer.choices[0].message
    assert message.content is None
    assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}']
    structured = inference.requests[-1].sampling.structured
    assert structured.form == "json_schema"
    assert json.loads(structured.schema_text) == PARAMETERS


async def test_a_required_call_chooses_its_function(client, inference):
    inference.text.template = UNKNOWN
    options = {"tools": [ADD, NOW], "tool_choice": "required"}
    for name, arguments in (("now", "{}"), ("add", '{"a": 1, "b": "name"}')):
        inference.script = spell(f'{{"name": "{name}", "arguments": {arguments}}}')
        called = [[name, arguments.replace(": ", ":").replace(", ", ",")]]
        assert await streamed(client, **options) == ("", called, "tool_calls")
    text = inference.requests[-1].sampling.structured.schema_text
    add, now = json.loads(text)["anyOf"]
    assert add["properties"] == {"name": {"const": "add"}, "arguments": PARAMETERS}
    assert now["properties"]["arguments"]["properties"] == {}
    inference.script = spell('{"name": "now", "arg', FinishReason.LENGTH)
    assert await streamed(client, **options) == ('{"name": "now", "arg', [], "length")
    inference.script = spell('{"name": "add", "arguments": {"a": 1', FinishReason.LENGTH)
    assert await streamed(client, **options) == ("", [["add", '{"a":1']], "length")


async def test_a_chosen_calls_arguments_are_sent_as_they_come(client, inference):
    inference.text.template = UNKNOWN
    inference.script = spell('{"name": "add", "arguments": {"a": 123456}}')
    options = {"tools": [ADD, NOW], "tool_choice": "required", "stream": True}
    num_pieces = 0
    async for chunk in await client.chat.completions.create(
        model="org/tiny", messages=HELLO, **options
    ):
        num_pieces += bool(chunk.choices[0].delta.tool_calls)
    assert num_pieces > 8


async def test_a_call_that_was_cut_short_says_so(client, inference):
    inference.text.template = UNKNOWN
    inference.script = spell('{"a"', FinishReason.LENGTH)
    options = {"tools": [ADD], "tool_choice": NAMED}
    assert await streamed(client, **options) == ("", [["add", '{"a"']], "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [ADD, ADD]}, r'tools\[1\].function.name is "add"; another tool has this'),
        ({"tools": [NOW], "tool_choice": NAMED}, 'tool_choice names the function "add"; tools has'),
        ({"tool_choice": "required"}, 'tool_choice is "required"; it needs tools'),
        ({"tool_choice": NAMED}, 'tool_choice names the function "add"; tools has no such'),
        (
            {"tools": [ADD], "extra_body": {"guided_regex": "a"}},
            "guided_regex is set; with tools it must be unset, or tool_choice must be",
        ),
        (
            {"tools": [ADD], "extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs.regex is set; with tools it must be unset",
        ),
        (
            {"tools": [ADD], "extra_body": {"structured_outputs": {}, "guided_json": "{"}},
            "guided_json is not JSON",
        ),
        (
            {"tools": [ADD], "extra_body": {"guided_json": "{"}},
            "guided_json is not JSON",
        ),
        (
            {"tools": [ADD], "extra_body": {"guided_json": {"allOf": [{"pattern": "a"}] * 9}}},
            "guided_json has up to 9 patterns and formats for one string",
        ),
        (
            {"tools": [ADD], "response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"allOf": [{"pattern": "a"}] * 9}}}},
            "response_format.json_schema.schema has up to 9 patterns",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            r'tools\[0\].function.name is "a b"',
        ),
        ({"tools": [{"type": "web_search"}]}, r'tools\[0\].type is "web_search"'),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ]}]},
            r'messages\[0\].tool_calls is set; with role "user"',
        ),
        (
            {"tools": [
                {"type": "function", "function": {"name": "add", "parameters": {"$ref": "#"}}}
            ], "tool_choice": "required"},
            'tools has "\\$ref": "#", which leads back to itself',
        ),
    ],
)  # fmt: skip
async def test_invalid_values_are_refused_by_name(client, inference, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        await client.chat.completions.create(**{"model": "org/tiny", "messages": HELLO, **options})
    assert not inference.requests


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("{{ messages }}", {"tools": [ADD]}, "tools has 1 entries.*chat template"),
        ("{{ tools }}", {"tools": [ADD]}, 'tool_choice is "auto"; with this model it must be'),
        ("{{ tools }}<tool_call><function=", {"tools": [ADD]}, 'tool_choice is "auto"'),
        ("{{ tools }}<tool_call>", {"tools": [STRICT]}, r"tools\[0\].function.strict is true"),
        (
            "{{ tools }}[TOOL_CALLS]",
            {"tools": [ADD], "parallel_tool_calls": False},
            "parallel_tool_calls is false",
        ),
    ],
)
async def test_features_that_the_model_lacks_are_refused_by_name(
    client, inference, template, options, message
):
    inference.text.template = ChatTemplate(template, {})
    with pytest.raises(openai.BadRequestError, match=message):
        await client.chat.completions.create(model="org/tiny", messages=HELLO, **options)
    assert not inference.requests


async def test_a_schema_that_cannot_be_followed_is_the_tools(client, inference):
    inference.text.template = UNKNOWN
    inference.refusal = InvalidArgumentError("sampling.structured.json_schema", "is no JSON schema")
    with pytest.raises(openai.BadRequestError, match="tools is no JSON schema"):
        await client.chat.completions.create(
            model="org/tiny", messages=HELLO, tools=[ADD], tool_choice=NAMED
        )
    with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema is no"):
        await client.chat.completions.create(
            model="org/tiny",
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        )
    with pytest.raises(openai.BadRequestError, match="guided_json is no"):
        await client.completions.create(
            model="org/tiny", prompt="x", extra_body={"guided_json": {}}
        )

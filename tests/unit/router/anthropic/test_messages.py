"""/v1/messages with the `anthropic` package: the model's prompt and the client's answer."""

import json

import anthropic
import pytest
from openai_fakes import play, spell

from contract.errors import (
    ContextLengthError,
    InvalidArgumentError,
    QuotaError,
    TooBusyError,
    UnavailableError,
)
from contract.outputs import FinishReason, OutputDelta, OutputError, OutputFinished, Usage
from router.text.chat_template import ChatTemplate
from router.text.structured_output import to_grammar

HELLO = [{"role": "user", "content": "Hello"}]
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    },
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ASK = {"model": "org/tiny", "max_tokens": 16, "messages": HELLO}
THINKS = ChatTemplate("{{ tools }}{{ enable_thinking }}<tool_call><think></think>", {})


def shown(inference):
    """The template's last input: messages, and other variables."""
    return inference.text.chats[-1]


async def raw_events(client, **options):
    """Each event of a stream: its name and its JSON."""
    async with client.messages.with_streaming_response.create(
        **{**ASK, **options}, stream=True
    ) as response:
        lines = [line async for line in response.iter_lines() if line]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in pairs
    ]


# --- answers --------------------------------------------------------------------------------------


async def test_an_answer_is_a_message(client, inference):
    message = await client.messages.create(**ASK)
    assert (message.role, message.type, message.model) == ("assistant", "message", "org/tiny")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": "Hi!"}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    num_prompt = len(inference.requests[0].prompt)
    assert message.usage.input_tokens == num_prompt - 2
    assert message.usage.cache_read_input_tokens == 1
    assert message.usage.cache_creation_input_tokens == 1, "of two that are pinned"
    assert message.usage.output_tokens == 3
    assert message._request_id == inference.requests[0].request_id


async def test_a_stream_has_anthropics_events(client, inference):
    inference.script = play([
        OutputDelta(0, 0, (72,), "H"),
        OutputDelta(0, 1, (105,), "i"),
        OutputFinished(0, FinishReason.STOP),
        Usage(3, 2, 1),
    ])  # fmt: skip
    events = await raw_events(client)
    assert all(name == value["type"] for name, value in events)
    start = events[0][1]["message"]
    assert start["id"] == "msg_" + inference.requests[0].request_id
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == 2
    usage = {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 2,
    }
    block = {"type": "text", "text": ""}
    assert [value for _, value in events[1:]] == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "H"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "i"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("finish", "max_tokens", "reason", "sequence"),
    [
        ({"reason": FinishReason.STOP, "stop_token_id": 0}, 16, "end_turn", None),
        ({"reason": FinishReason.STOP, "stop_string": "END"}, 16, "stop_sequence", "END"),
        ({"reason": FinishReason.LENGTH}, 3, "max_tokens", None),
        ({"reason": FinishReason.LENGTH}, 9999, "model_context_window_exceeded", None),
    ],
)
async def test_stop_reasons(client, inference, finish, max_tokens, reason, sequence):
    inference.script = spell("Hi!", **finish)
    options = {**ASK, "max_tokens": max_tokens, "stop_sequences": ["END"]}
    message = await client.messages.create(**options)
    async with client.messages.stream(**options) as stream:
        streamed = await stream.get_final_message()
    for answer in (message, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    request = inference.requests[-1]
    assert request.stop == ("END",)
    assert request.sampling.max_tokens == min(max_tokens, 64)
    assert request.cuts_max_tokens


async def test_parameters_reach_the_sampler(client, inference):
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    await client.messages.create(
        **ASK, metadata={"user_id": "someone"}, service_tier="auto", extra_body=sampling
    )
    (request,) = inference.requests
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling
    assert request.add_special_tokens is False


# --- conversations --------------------------------------------------------------------------------


async def test_a_conversation_is_shown_to_the_template(client, inference):
    await client.messages.create(
        **{
            **ASK,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be kind."},
            ],
            "messages": [
                {"role": "user", "content": "Add."},
                {"role": "user", "content": [{"type": "text", "text": "Now."}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "of any kind"},
                        {"type": "text", "text": "So:"},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": [1, "x"]}},
                        {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "c2",
                            "content": [{"type": "text", "text": "no clock"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "Well?"},
                    ],
                },
                {"role": "system", "content": "Hurry."},
            ],
        }
    )
    messages, _ = shown(inference)
    assert messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Add.\nNow."},
        {
            "role": "assistant",
            "content": "So:",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": [1, "x"]}},
                },
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: no clock", "tool_call_id": "c2"},
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Hurry."},
    ]


async def test_the_assistants_last_message_is_continued(client, inference):
    begun = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    await client.messages.create(**{**ASK, "messages": begun})
    _, variables = shown(inference)
    assert variables["continue_final_message"] is True
    assert variables["add_generation_prompt"] is False


async def test_an_answer_can_be_sent_back(client, inference):
    inference.script = spell(f"So:\n{CALL}")
    first = await client.messages.create(**ASK, tools=[ADD])
    call = first.content[1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    await client.messages.create(
        **{
            **ASK,
            "messages": [
                *HELLO,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ],
        },
        tools=[ADD],
    )
    messages, _ = shown(inference)
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert messages[2] == {"role": "tool", "content": "2", "tool_call_id": call.id}


async def test_tokens_are_counted_as_the_prompt_has_them(client, inference):
    asked = {"messages": HELLO, "system": "Be brief.", "tools": [ADD], "model": "org/tiny"}
    await client.messages.create(**asked, max_tokens=4)
    counted = await client.messages.count_tokens(**asked)
    assert counted.input_tokens == len(inference.requests[0].prompt)
    rendered, counted_chat = inference.text.chats
    assert rendered == counted_chat


# --- tools ----------------------------------------------------------------------------------------


async def test_tools_are_shown_as_functions(client, inference):
    await client.messages.create(**ASK, tools=[ADD, {**NOW, "type": "custom"}])
    _, variables = shown(inference)
    assert [tool["function"] for tool in variables["tools"]] == [
        {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]},
        {"name": "now", "parameters": NOW["input_schema"]},
    ]


async def test_calls_are_blocks(client, inference):
    inference.script = spell(f"So:\n{CALL}\n{CALL}")
    message = await client.messages.create(**ASK, tools=[ADD])
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in message.content[1:]] == [("add", {"a": 1})] * 2
    assert message.content[1].id != message.content[2].id
    inference.script = spell(CALL)
    values = [value for _, value in await raw_events(client, tools=[ADD])]
    start = next(value for value in values if value["type"] == "content_block_start")
    assert start["content_block"] | {"id": ""} == {
        "type": "tool_use",
        "id": "",
        "name": "add",
        "input": {},
    }
    deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"a": 1}


async def test_a_call_that_was_cut_short_has_what_is_whole(client, inference):
    inference.script = spell(
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x', FinishReason.LENGTH
    )
    message = await client.messages.create(**{**ASK, "max_tokens": 3}, tools=[ADD])
    (block,) = message.content
    assert (message.stop_reason, block.name, block.input) == ("max_tokens", "add", {"a": 1})


@pytest.mark.parametrize(
    ("choice", "names", "is_forced"),
    [
        ({"type": "auto"}, [], False),
        ({"type": "any"}, ["add", "now"], True),
        ({"type": "tool", "name": "now"}, ["now"], True),
        ({"type": "none"}, [], False),
    ],
)
async def test_tool_choice(client, inference, choice, names, is_forced):
    inference.script = spell("{}")
    await client.messages.create(**ASK, tools=[ADD, NOW], tool_choice=choice)
    structured = inference.requests[-1].sampling.structured
    assert (structured is not None) == is_forced
    if structured is not None:
        grammar = to_grammar(structured).grammar
        assert [name for name in ("add", "now") if name in grammar] == names


async def test_calls_may_be_limited_to_one(client, inference):
    for is_alone in (False, True):
        await client.messages.create(
            **ASK,
            tools=[ADD],
            tool_choice={"type": "auto", "disable_parallel_tool_use": is_alone},
        )
    assert [request.stop for request in inference.requests] == [(), ("</tool_call>",)]
    inference.script = spell(CALL.removesuffix("</tool_call>"), stop_string="</tool_call>")
    message = await client.messages.create(
        **ASK, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)


async def test_a_form_can_be_demanded(client, inference):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await client.messages.create(
        **ASK, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(inference.requests[-1].sampling.structured.schema_text) == schema


# --- thinking -------------------------------------------------------------------------------------


async def test_thinking_is_a_block(client, inference):
    inference.text.template = THINKS
    inference.script = spell("<think>Hm.</think>Hi!")
    message = await client.messages.create(**ASK)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert thinking.signature
    assert text.text == "Hi!"
    values = [value for _, value in await raw_events(client)]
    kinds = [value["delta"]["type"] for value in values if value["type"] == "content_block_delta"]
    assert kinds.index("signature_delta") == kinds.index("text_delta") - 1
    assert kinds[0] == "thinking_delta"


async def test_thinking_can_be_hidden(client, inference):
    inference.text.template = THINKS
    inference.script = spell("<think>Hm.</think>Hi!")
    message = await client.messages.create(
        **ASK, thinking={"type": "adaptive", "display": "omitted"}
    )
    assert message.content[0].thinking == ""
    assert message.content[0].signature


async def test_thinking_has_a_budget(client, inference):
    inference.text.template = THINKS
    inference.text.marker_ids = {"<think>": 5, "</think>": 6}
    await client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 9})
    assert shown(inference)[1]["enable_thinking"] is True
    assert "9" in inference.requests[-1].sampling.structured.grammar
    await client.messages.create(**ASK, thinking={"type": "adaptive"})
    assert "enable_thinking" not in shown(inference)[1]
    assert inference.requests[-1].sampling.structured is None


async def test_thinking_can_be_turned_off(client, inference):
    inference.text.template = THINKS
    await client.messages.create(**ASK, thinking={"type": "disabled"})
    assert shown(inference)[1]["enable_thinking"] is False
    # A template without a switch for thinking: there is no budget.
    inference.text.template = ChatTemplate("{{ messages }}<think></think>", {})
    inference.text.marker_ids = {"<think>": 5, "</think>": 6}
    await client.messages.create(**ASK, thinking={"type": "disabled"})
    assert inference.requests[-1].sampling.structured is not None
    inference.text.template = ChatTemplate("{{ messages }}", {})
    await client.messages.create(**ASK, thinking={"type": "disabled"})
    assert inference.requests[-1].sampling.structured is None


async def test_thinking_of_gpt_oss_has_a_budget_and_can_be_turned_off(client, inference):
    names = ("start", "channel", "constrain", "message", "end", "return", "call")
    inference.text.template = ChatTemplate("{{ messages }}<|channel|><|message|>", {})
    inference.text.marker_ids = {f"<|{name}|>": 100 + i for i, name in enumerate(names)}
    budget = {"type": "enabled", "budget_tokens": 9}
    for thinking, told in ((budget, "{0,9}"), ({"type": "disabled"}, "(note next)* last")):
        await client.messages.create(**ASK, thinking=thinking)
        assert told in inference.requests[-1].sampling.structured.grammar


async def test_effort_is_for_templates_that_know_it(client, inference):
    await client.messages.create(**ASK, output_config={"effort": "high"})
    assert "reasoning_effort" not in shown(inference)[1]
    inference.text.template = ChatTemplate("{{ reasoning_effort }}", {})
    for effort, told in (("high", "high"), ("max", "xhigh")):
        await client.messages.create(**ASK, output_config={"effort": effort})
        assert shown(inference)[1]["reasoning_effort"] == told


# --- caching --------------------------------------------------------------------------------------


async def test_marks_pin_the_prompt_for_the_longest_of_their_times(client, inference):
    short, long = ({"type": "ephemeral", **ttl} for ttl in ({}, {"ttl": "1h"}))

    def text(mark):
        return {"type": "text", "text": "Hello", "cache_control": mark}

    def result(mark, inner=None):
        block = {"type": "tool_result", "tool_use_id": "c", "content": [text(inner)]}
        return [{**block, "cache_control": mark}]

    for fields in (
        {},
        {"cache_control": short},
        {"system": [text(short)]},
        {"tools": [{**ADD, "cache_control": long}, NOW], "system": [text(short)]},
        {"messages": [{"role": "user", "content": [text(short), text(long)]}]},
        {"messages": [{"role": "user", "content": result(short)}]},
        {"messages": [{"role": "user", "content": result(None, long)}]},
    ):
        await client.messages.create(**{**ASK, **fields})
    assert [request.cache_pin_s for request in inference.requests] == [
        None, 300, 300, 3600, 3600, 300, 3600
    ]  # fmt: skip


# --- refusals -------------------------------------------------------------------------------------


def said(error):
    """A refusal's type and message; its shape is Anthropic's."""
    body = error.body
    assert body["type"] == "error"
    assert body["request_id"] == error.response.headers["request-id"]
    return body["error"]["type"], body["error"]["message"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.test/x.png"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            r'messages\[0\].content\[0\] has the type "image"; it must be one of "text"',
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]},
            r'messages\[0\].content\[0\].tool_result.content\[0\].type is "image"',
        ),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"}]}, *HELLO]},
            'has the type "redacted_thinking"',
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_use", "id": "c", "name": "add", "input": {}}]}]},
            r'messages\[0\].content\[0\].type is "tool_use", which messages with role "user"',
        ),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\].content is empty"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "add", "input": {}}]}]},
            r"messages\[1\] is the last message, which the output continues; it must have only",
        ),
        ({"messages": []}, "messages is "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         r'tools\[0\].type is "web_search_20250305"'),
        ({"tools": [{**ADD, "defer_loading": True}]}, "defer_loading is true; it is not supported"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "now"}},
         'tool_choice names the function "now"'),
        ({"tool_choice": {"type": "tool", "name": "now"}}, 'tool_choice names the function "now"'),
        ({"tool_choice": {"type": "any"}}, 'tool_choice.type is "any"; it needs tools'),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 'thinking.type is "enabled"'),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is .*; it is not supported"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
         "context_management is .*; it is not supported"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate is 1; there is no such field"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\] has"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)  # fmt: skip
async def test_invalid_values_are_refused_by_name(client, inference, options, message):
    if "stop_sequences" in options:
        inference.refusal = InvalidArgumentError("stop[0]", "has 0 characters")
    with pytest.raises(anthropic.BadRequestError, match=message) as raised:
        await client.messages.create(**{**ASK, **options})
    assert said(raised.value)[0] == "invalid_request_error"
    assert not inference.requests


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("{{ tools }}", {}, 'tool_choice.type is "auto"; .* must be "none", "any" or name a'),
        (
            "{{ tools }}[TOOL_CALLS]",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use is true, which this model does not support",
        ),
    ],
)
async def test_features_that_the_model_lacks_are_refused_by_name(
    client, inference, template, options, message
):
    inference.text.template = ChatTemplate(template, {})
    with pytest.raises(anthropic.BadRequestError, match=message):
        await client.messages.create(**ASK, tools=[ADD], **options)
    assert not inference.requests


@pytest.mark.parametrize(
    ("thinking", "field"),
    [
        ({"type": "enabled", "budget_tokens": 9}, "thinking.budget_tokens"),
        ({"type": "disabled"}, "thinking.type"),
    ],
)
async def test_a_limit_on_thinking_without_token_markers_is_refused_by_name(
    client, inference, thinking, field
):
    inference.text.template = ChatTemplate("{{ messages }}<think></think>", {})
    with pytest.raises(anthropic.BadRequestError, match=f"{field} is set; .* are not tokens"):
        await client.messages.create(**ASK, thinking=thinking)


async def test_the_schema_of_an_output_with_tools_is_refused_by_name(client):
    schema = {"allOf": [{"pattern": "a"}] * 9}
    config = {"format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema has up"):
        await client.messages.create(**ASK, tools=[ADD], output_config=config)


async def test_max_tokens_is_required(client):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is missing"):
        await client.post("/v1/messages", body={"messages": HELLO}, cast_to=object)


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "message"),
    [
        (TooBusyError("the queue is full", 7), 529, "overloaded_error", "the queue is full"),
        (QuotaError("no tokens left", 7), 429, "rate_limit_error", "no tokens left"),
        (UnavailableError("starting"), 503, "api_error", "starting"),
        (RuntimeError("a secret"), 500, "api_error", "internal error"),
        (
            ContextLengthError("prompt", "has 70 tokens"),
            400,
            "invalid_request_error",
            "prompt is too long: messages has 70 tokens",
        ),
    ],
)
async def test_refusals_have_anthropics_status_and_shape(
    client, inference, refusal, status, kind, message
):
    inference.refusal = refusal
    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as raised:
            await client.messages.create(**ASK, stream=stream)
        assert raised.value.status_code == status
        assert said(raised.value) == (kind, message)
    retry_after = raised.value.response.headers.get("Retry-After")
    assert retry_after == ("7" if status in (429, 529) else None)


async def test_an_unknown_model_or_path_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError, match="model claude is not served"):
        await client.messages.create(**{**ASK, "model": "claude"})
    with pytest.raises(anthropic.NotFoundError) as raised:
        await client.get("/v1/messages/nothing", cast_to=object)
    assert said(raised.value)[0] == "not_found_error"


async def test_a_stream_that_breaks_ends_with_an_error(client, inference):
    lost = OutputError(14, "the worker is lost", retryable=True)
    inference.script = play(
        [OutputDelta(0, 0, (72,), "H"), OutputFinished(0, FinishReason.ERROR, error=lost)]
    )
    *_, (name, value) = await raw_events(client)
    assert name == "error"
    assert value["error"] == {"type": "api_error", "message": "the worker is lost"}
    with pytest.raises(anthropic.APIStatusError, match="the worker is lost"):
        await client.messages.create(**ASK)
    with pytest.raises(anthropic.APIError, match="the worker is lost"):
        async with client.messages.stream(**ASK) as stream:
            await stream.get_final_message()


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([NOW, {**ADD, "strict": True}], r"tools\[1\]\.strict is true"),
        ([NOW, NOW], r"tools\[1\]\.name is \"now\"; another tool"),
    ],
)
async def test_a_refused_tool_has_the_name_of_this_api(client, inference, tools, message):
    inference.text.template = ChatTemplate("{{ tools }}<tool_call>", {})
    with pytest.raises(anthropic.BadRequestError, match=message):
        await client.messages.create(**ASK, tools=tools)
    assert not inference.requests

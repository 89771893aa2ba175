"""Thinking in chats, with the `openai` package: separated from text, bounded, and sent back."""

import openai
import pytest
from openai_fakes import spell

from router.text.chat_template import ChatTemplate
from router.text.structured_output import to_grammar

HELLO = [{"role": "user", "content": "Hello"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
THINKS = ChatTemplate("{{ tools }}{{ enable_thinking }}<think></think><tool_call>", {})
OUTPUT = "<think>\nHm.\n</think>\n\nHi!"


@pytest.fixture
async def client(server):
    host, port = server
    async with openai.AsyncOpenAI(
        base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0, timeout=None
    ) as client:
        yield client


@pytest.fixture
def thinks(inference):
    inference.text.template = THINKS
    inference.script = spell(OUTPUT)
    return inference


async def answered(client, **options):
    answer = await client.chat.completions.create(model="org/tiny", messages=HELLO, **options)
    return answer.choices[0].message


@pytest.mark.usefixtures("thinks")
async def test_thinking_is_told_from_content(client):
    message = await answered(client)
    assert (message.reasoning_content, message.reasoning, message.content) == ("Hm.", "Hm.", "Hi!")
    thought = content = ""
    async for chunk in await client.chat.completions.create(
        model="org/tiny", messages=HELLO, stream=True
    ):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (thought, content) == ("Hm.", "Hi!")


async def test_thinking_and_calls_are_read_together(client, thinks):
    thinks.script = spell(
        '<think>Hm.</think><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    )
    message = await answered(client, tools=[ADD])
    assert (message.reasoning, message.content) == ("Hm.", None)
    assert [call.function.name for call in message.tool_calls] == ["add"]


async def test_messages_of_gpt_oss_are_read_without_tools(client, inference):
    inference.text.template = ChatTemplate("<|channel|><|message|>", {})
    inference.text.marker_ids = {"<|channel|>": 1}
    inference.script = spell(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"
    )
    message = await answered(client)
    assert (message.reasoning, message.content) == ("Hm.", "Hi!")
    assert not inference.requests[0].skip_special_tokens


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thinking_of_before_is_shown_to_the_template(client, thinks, name):
    before = {"role": "assistant", "content": "Hi!", name: "Hm."}
    await client.chat.completions.create(model="org/tiny", messages=[*HELLO, before, *HELLO])
    (_, shown, _), _ = thinks.text.chats[0]
    assert (shown["reasoning_content"], shown["content"]) == ("Hm.", "Hi!")


BUDGETS = [
    {"thinking_budget": 5},
    {"thinking_token_budget": 5},
    {"reasoning": {"max_tokens": 5}},
]


@pytest.mark.parametrize("budget", BUDGETS)
async def test_a_budget_is_part_of_the_outputs_grammar(client, thinks, budget):
    thinks.text.marker_ids = {"<think>": 7, "</think>": 8}
    assert (await answered(client, extra_body=budget)).reasoning == "Hm."
    (request,) = thinks.requests
    assert "<[^8]>{0,5} <[8]>" in request.before_form
    assert to_grammar(request.sampling.structured, request.before_form).grammar


GPT_OSS = ("start", "channel", "constrain", "message", "end", "return", "call")


@pytest.mark.parametrize("tools", [{}, {"tools": [ADD]}])
async def test_gpt_oss_has_a_budget_for_each_message_of_thinking(client, inference, tools):
    inference.text.template = ChatTemplate("{{ tools }}<|channel|><|message|>", {})
    inference.text.marker_ids = {f"<|{name}|>": 100 + i for i, name in enumerate(GPT_OSS)}
    inference.script = spell(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"
    )
    assert (await answered(client, extra_body=BUDGETS[0], **tools)).reasoning == "Hm."
    (request,) = inference.requests
    grammar = to_grammar(request.sampling.structured, request.before_form).grammar
    assert "{0,5}" in grammar
    assert ("to=functions." in grammar) == bool(tools)


@pytest.mark.parametrize(
    "options", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}]
)
async def test_a_forced_call_is_no_thinking_even_if_the_prompt_has_begun_it(
    client, thinks, options
):
    """The markers are no tokens here, so the grammar has no thinking."""
    thinks.script = spell('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    answer = await client.chat.completions.create(
        model="org/tiny",
        messages=[*HELLO, {"role": "assistant", "content": "<think>Hm"}],
        tools=[ADD],
        extra_body={"continue_final_message": True},
        **options,
    )
    message = answer.choices[0].message
    assert not message.model_extra, "there is no reasoning"
    assert [call.function.name for call in message.tool_calls] == ["add"]


async def test_a_form_comes_behind_thinking(client, thinks):
    thinks.text.marker_ids = {"<think>": 7, "</think>": 8}
    await answered(client, response_format={"type": "json_object"})
    (request,) = thinks.requests
    assert request.sampling.structured.json_object
    assert to_grammar(request.sampling.structured, request.before_form).grammar


async def test_effort_is_what_the_template_knows(client, thinks):
    await answered(client, reasoning_effort="none")
    thinks.text.template = ChatTemplate("{{ reasoning_effort }}", {})
    await answered(client, reasoning_effort="high")
    assert [kwargs for _, kwargs in thinks.text.chats] == [
        {"enable_thinking": False},
        {"reasoning_effort": "high"},
    ]


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (THINKS, {"reasoning_effort": "high"}, 'reasoning_effort is "high"; the model'),
        (ChatTemplate("", {}), {"reasoning_effort": "none"}, 'reasoning_effort is "none"'),
        (ChatTemplate("", {}), {"extra_body": BUDGETS[0]}, "no parser for its thinking"),
        (
            ChatTemplate("<|channel|><|message|>", {}),
            {"extra_body": BUDGETS[0]},
            "markers of its thinking are not tokens",
        ),
        (
            THINKS,
            {"extra_body": {"reasoning": {"max_tokens": 3}}},
            "reasoning.max_tokens is set; with this model it must be unset",
        ),
        (THINKS, {"extra_body": BUDGETS[0]}, "markers of its thinking are not tokens"),
        (THINKS, {"extra_body": {"thinking_budget": -1}}, "thinking_budget is -1"),
        (
            THINKS,
            {"extra_body": {"thinking_budget": 1, "thinking_token_budget": 2}},
            "thinking_budget is 1, but thinking_token_budget is 2; both must be equal",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused(client, inference, template, options, message):
    inference.text.template = template
    with pytest.raises(openai.BadRequestError, match=message):
        await answered(client, **options)
    assert not inference.requests

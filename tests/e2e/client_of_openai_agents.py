"""The OpenAI Agents SDK, in an environment of its own: URL MODEL; fails if an answer is wrong.

The model follows a script: it says "I look.", calls the tool, reports its result, and then answers
a second question. With instructions it calls the tool, and its result is JSON.
"""

import asyncio
import sys

import agents
import openai
import pydantic

URL, MODEL = sys.argv[1:]
TEXT, ARGUMENTS = "response.output_text.delta", "response.function_call_arguments.delta"


class Forecast(pydantic.BaseModel):
    sky: str
    days: int


calls: list[tuple[str, int]] = []


@agents.function_tool
def weather(city: str, days: int) -> str:
    """Return the forecast for a city."""
    calls.append((city, days))
    return "rain"


async def stream(agent: agents.Agent, asked: str | list) -> agents.RunResultStreaming:
    """Return the result, after checks of the streamed pieces."""
    result = agents.Runner.run_streamed(agent, asked)
    pieces = {TEXT: "", ARGUMENTS: ""}
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type in pieces:
            pieces[event.data.type] += event.data.delta
    items = result.new_items
    assert pieces[TEXT] == agents.ItemHelpers.text_message_outputs(items), pieces
    arguments = [item.raw_item.arguments for item in items if item.type == "tool_call_item"]
    assert pieces[ARGUMENTS] == "".join(arguments), pieces
    return result


async def converse(model: str | agents.Model, run) -> None:
    # without this, streams of chat completions have no usage
    settings = agents.ModelSettings(include_usage=True)
    agent = agents.Agent(name="Forecaster", model=model, model_settings=settings, tools=[weather])
    calls.clear()
    result = await run(agent, "How is the weather in Cologne?")
    assert result.final_output.strip() == "It rains in Köln.", result
    assert calls == [("Köln", 2)], calls
    assert [item.type for item in result.new_items] == [
        "message_output_item",
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ], result.new_items
    said = agents.ItemHelpers.text_message_output(result.new_items[0])
    assert said.strip() == "I look.", said
    usage = result.context_wrapper.usage
    assert usage.requests == 2, usage
    assert min(usage.input_tokens, usage.output_tokens) > 0, usage
    question = {"role": "user", "content": "What shall I take?"}
    result = await run(agent, [*result.to_input_list(), question])
    assert result.final_output.strip() == "Take a coat.", result


async def converse_in_a_form(model: str | agents.Model, run) -> None:
    """The answer has a form although the agent has tools."""
    agent = agents.Agent(
        name="Forecaster",
        instructions="Forecast.",
        model=model,
        tools=[weather],
        output_type=Forecast,
    )
    calls.clear()
    result = await run(agent, "How is the weather in Cologne?")
    assert result.final_output == Forecast(sky="rain", days=2), result
    assert calls == [("Köln", 2)], calls


async def main() -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)
    agents.set_default_openai_client(client, use_for_tracing=False)
    by_responses = MODEL  # the default of the SDK
    by_chat = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    for model in (by_responses, by_chat):
        for run in (agents.Runner.run, stream):
            await converse(model, run)
            await converse_in_a_form(model, run)


asyncio.run(main())

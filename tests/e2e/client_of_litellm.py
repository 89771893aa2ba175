"""LiteLLM, in an environment of its own: URL MODEL PROMPT ANSWER; fails if an answer is wrong."""

import asyncio
import sys

import litellm

URL, MODEL, PROMPT, ANSWER = sys.argv[1:]
OPTIONS = {
    "api_base": URL,
    "api_key": "none",
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0,
    "max_tokens": 16,
    "num_retries": 0,
}


async def ask(model: str) -> str:
    return (await litellm.acompletion(model, **OPTIONS)).choices[0].message.content


for model in (f"hosted_vllm/{MODEL}", f"openai/{MODEL}"):
    whole = litellm.completion(model, **OPTIONS)
    assert whole.choices[0].message.content == ANSWER, whole
    assert whole.usage.completion_tokens == 16, whole
    chunks = litellm.completion(model, **OPTIONS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert asyncio.run(ask(model)) == ANSWER
    refusal = None
    try:
        litellm.completion(model, **OPTIONS | {"temperature": -1})
    except litellm.BadRequestError as error:
        refusal = str(error)
    assert refusal is not None, "a temperature of -1 was accepted"
    assert "temperature is -1" in refusal, refusal

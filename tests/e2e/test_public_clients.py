"""Published clients of OpenAI's API, unmodified, use a live service.

Three of them need packages that conflict with Quire's own tests or with each other's:
`make public-clients-test` installs them apart, and runs `client_of_*.py` with their interpreters.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from tokenizers import Tokenizer

from tests.e2e.service import Service

PROMPT = "What is a quire?"
GREEDY = {"temperature": 0, "max_tokens": 16}
PAINT = {
    "title": "paint",
    "description": "Paint the house.",
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI, service: Service) -> str:
    """The expected answer to the prompt."""
    return ask(client, service.model)


def ask(client: openai.OpenAI, model: str) -> str:
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    text = whole.choices[0].message.content
    assert text
    return text


# --- openai, asynchronously -----------------------------------------------------------------------


@pytest.fixture
async def aio_client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_openai_async(aio_client: openai.AsyncOpenAI, service: Service, answer: str):
    messages = [{"role": "user", "content": PROMPT}]
    options = {"model": service.model, "messages": messages, **GREEDY}
    whole = await aio_client.chat.completions.create(**options)
    assert whole.choices[0].message.content == answer
    stream = await aio_client.chat.completions.create(**options, stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == answer


async def test_openai_parse(aio_client: openai.AsyncOpenAI, service: Service):
    parsed = await aio_client.chat.completions.parse(
        model=service.model,
        messages=[{"role": "user", "content": PROMPT}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "paint", "schema": PAINT, "strict": True},
        },
        max_tokens=64,
    )
    assert json.loads(parsed.choices[0].message.content or "")["colour"] in ("red", "green")


# --- langchain-openai -----------------------------------------------------------------------------


@pytest.fixture
def chat(service: Service) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{service.url}/v1",
        api_key="none",
        model=service.model,
        max_retries=0,
        **GREEDY,
    )


def test_langchain_chat(chat: ChatOpenAI, answer: str):
    message = chat.invoke(PROMPT)
    assert message.content == answer
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 16
    assert message.response_metadata["finish_reason"] == "length"
    pieces = list(chat.stream(PROMPT, stream_usage=True))
    assert "".join(piece.text for piece in pieces) == answer
    assert sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces) == 16


async def test_langchain_async(chat: ChatOpenAI, answer: str):
    assert (await chat.ainvoke(PROMPT)).content == answer
    assert "".join([piece.text async for piece in chat.astream(PROMPT)]) == answer


def test_langchain_tools(chat: ChatOpenAI):
    chat = chat.model_copy(update={"max_tokens": 160})
    asked = HumanMessage(PROMPT)
    message = chat.bind_tools([PAINT], tool_choice="paint").invoke([asked])
    (call,) = message.tool_calls
    assert call["name"] == "paint"
    assert call["args"]["colour"] in ("red", "green")
    after = [asked, message, ToolMessage("done", tool_call_id=call["id"])]
    assert chat.bind_tools([PAINT]).invoke(after).response_metadata["finish_reason"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat: ChatOpenAI, method: Any):
    chat = chat.model_copy(update={"max_tokens": 64})
    colour = chat.with_structured_output(PAINT, method=method).invoke(PROMPT)
    assert isinstance(colour, dict)
    assert colour["colour"] in ("red", "green")


def test_langchain_completion(service: Service, client: openai.OpenAI):
    llm = OpenAI(base_url=f"{service.url}/v1", api_key="none", model=service.model, **GREEDY)
    whole = client.completions.create(model=service.model, prompt=PROMPT, **GREEDY)
    assert llm.invoke(PROMPT) == whole.choices[0].text
    assert "".join(llm.stream(PROMPT)) == whole.choices[0].text


# --- llm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", [[], ["--no-stream", "--schema", json.dumps(PAINT)]], ids=["stream", "json"]
)
def test_llm(service: Service, answer: str, tmp_path: Path, flags: list[str]):
    model = {
        "model_id": "quire",
        "model_name": service.model,
        "api_base": f"{service.url}/v1",
        "supports_schema": True,
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    num_tokens = "64" if "--schema" in flags else "16"
    options = ["-o", "temperature", "0", "-o", "max_tokens", num_tokens]
    shown = run(
        [sys.executable, "-m", "llm", "-m", "quire", "--key", "none", *options, *flags, PROMPT],
        {"LLM_USER_PATH": str(tmp_path)},
    )
    if "--schema" in flags:
        assert json.loads(shown)["colour"] in ("red", "green")
    else:
        assert shown.removesuffix("\n") == answer


# --- litellm, instructor --------------------------------------------------------------------------


@pytest.mark.public_clients
def test_litellm(service: Service, answer: str):
    run_apart("client_of_litellm.py", f"{service.url}/v1", service.model, PROMPT, answer)


@pytest.mark.public_clients
def test_instructor(service: Service):
    run_apart("client_of_instructor.py", f"{service.url}/v1", service.model, PROMPT)


# --- openai-agents --------------------------------------------------------------------------------


SYNTAXES = {
    "hermes": (
        "<tool_call> </tool_call>",
        "%s",
        '\n<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    ),
    "harmony": (
        "<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|return|> <|call|>",
        "<|channel|>commentary<|message|>%s",
        (
            "<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s"
        ),
    ),
}
"""A parser's name to the tokens of its syntax, a text, and a call behind it."""


@pytest.fixture(params=SYNTAXES)
def scripted(
    request: pytest.FixtureRequest,
    long_llama: Path,
    run_dir: Callable[[], Path],
    tmp_path: Path,
) -> Iterator[Service]:
    """A model that calls a tool, tells its result, and answers a second question."""
    tokens, said, called = SYNTAXES[request.param]
    model = tmp_path / "scripted"
    shutil.copytree(long_llama, model, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(tokens.split())  # strict functions need such tokens
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (model / "config.json").write_text(json.dumps(config))
    arguments = json.dumps({"city": "Köln", "days": 2}, ensure_ascii=False)
    # The chat template ends each message with an end token, so output N follows N messages.
    num_messages_to_output = {
        1: said % "I look." + called % arguments,
        3: said % "It rains in Köln.",
        5: said % "Take a coat.",
    }
    outputs = [num_messages_to_output.get(n, said % f"{n} messages came.") for n in range(6)]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in outputs]
    script = tmp_path / "script.json"
    script.write_text(json.dumps(encoded))
    worker, router = ["--structured-output"], [f"--tool-parser={request.param}"]
    with Service(run_dir(), model, worker=worker, router=router, script=script) as service:
        yield service


@pytest.mark.public_clients
def test_openai_agents(scripted: Service):
    python = os.environ["OPENAI_AGENTS_PYTHON"]  # see the Makefile
    url = f"{scripted.url}/v1"
    run_apart("client_of_openai_agents.py", url, scripted.model, python=python)


def run_apart(script: str, *arguments: str, python: str | None = None) -> None:
    python = python or os.environ["PUBLIC_CLIENTS_PYTHON"]  # see the Makefile
    run([python, str(Path(__file__).parent / script), *arguments], {})


def run(command: list[str], env: dict[str, str]) -> str:
    """The output of a program, which must succeed."""
    done = subprocess.run(
        command,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

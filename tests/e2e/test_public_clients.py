"""Published clients of OpenAI's API, unmodified, use a live service.

Some of them need packages that conflict with Quire's own tests or with each other's:
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
import torch
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.e2e.service import Service
from tests.models_fixture import BOS_TOKEN_ID

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
        '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
        "\n",
        "%s",
    ),
    "harmony": (
        "<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|return|> <|call|>",
        "<|channel|>commentary<|message|>%s",
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s",
        "<|end|><|start|>assistant",
        "<|channel|>final <|constrain|>json<|message|>%s",
    ),
}
"""A parser's name to the tokens of its syntax, a text, a call, what separates them, and an answer
with a form."""


@pytest.fixture(params=SYNTAXES)
def scripted(
    request: pytest.FixtureRequest,
    long_llama: Path,
    run_dir: Callable[[], Path],
    tmp_path: Path,
) -> Iterator[Service]:
    """A model that calls a tool, reports its result, and answers a second question.

    With instructions, it calls the tool and answers in JSON.
    """
    tokens, said, called, between, formed = SYNTAXES[request.param]
    model = tmp_path / "scripted"
    shutil.copytree(long_llama, model, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(tokens.split())  # strict functions need them as special tokens
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (model / "config.json").write_text(json.dumps(config))
    arguments = json.dumps({"city": "Köln", "days": 2}, ensure_ascii=False)
    # The chat template ends each message with an end token, so output N follows N messages.
    num_messages_to_output = {
        1: said % "I look." + between + called % arguments,
        2: called % arguments,
        3: said % "It rains in Köln.",
        4: formed % '{"sky": "rain", "days": 2}',
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
    if not any(Path(python).parents[1].glob("lib/*/site-packages/agents")):
        pytest.skip("openai-agents cannot be had from the package index")
    url = f"{scripted.url}/v1"
    run_apart("client_of_openai_agents.py", url, scripted.model, python=python)


# --- lm-eval --------------------------------------------------------------------------------------


LM_EVAL_TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "predict": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{prompt}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}
LM_EVAL_DOCS = (
    {"prompt": "A quire is a gathering of", "choices": [" pages", " dogs and foxes"]},
    {"prompt": "def add(a, b):\n    return", "choices": [" a + b", " range(10)"]},
    {"prompt": "One two three", "choices": [" four", " thirteen"]},
)


@pytest.mark.public_clients
def test_lm_eval(service: Service, client: openai.OpenAI, long_llama: Path, tmp_path: Path):
    """Its log-likelihoods are those of transformers."""
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(f"{json.dumps(doc)}\n" for doc in LM_EVAL_DOCS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(docs)}}}
    for name, task in LM_EVAL_TASKS.items():
        whole = {"task": name, "test_split": "test", **data, **task}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    about = f"model={service.model},base_url={service.url}/v1/completions,tokenizer={long_llama}"
    run(
        [
            *(os.environ["LM_EVAL_PYTHON"], "-m", "lm_eval", "run"),  # see the Makefile
            *("--model", "local-completions", "--model_args", f"{about},num_concurrent=4"),
            *("--tasks", *LM_EVAL_TASKS, "--include_path", str(tmp_path)),
            *("--output_path", str(tmp_path / "out"), "--log_samples"),
        ],
        {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )

    def replies(task: str) -> list[Any]:
        (path,) = (tmp_path / "out").rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        assert [sample["doc"] for sample in samples] == list(LM_EVAL_DOCS)
        return [sample["resps"] for sample in samples]

    tokenizer = Tokenizer.from_file(str(long_llama / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    for doc, chosen, predicted, written in zip(
        LM_EVAL_DOCS, replies("choose"), replies("predict"), replies("write"), strict=True
    ):
        prompt = doc["prompt"]
        assert isinstance(prompt, str)
        for choice, ((logprob, is_greedy),) in zip(doc["choices"], chosen, strict=True):
            wanted = loglikelihood(long_llama, encode(prompt), encode(prompt + choice))
            assert (float(logprob), is_greedy == "True") == (pytest.approx(wanted[0]), wanted[1])
        wanted = loglikelihood(long_llama, [BOS_TOKEN_ID], [BOS_TOKEN_ID, *encode(prompt)])
        assert float(predicted[0][0]) == pytest.approx(wanted[0])
        whole = client.completions.create(model=service.model, prompt=encode(prompt), **GREEDY)
        assert written == [[whole.choices[0].text]]


def loglikelihood(directory: Path, given: list[int], whole: list[int]) -> tuple[float, bool]:
    """The log-probability of the tokens of `whole` behind `given`, and whether it is the best."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    start, tokens = len(given), torch.tensor(whole)
    with torch.inference_mode():
        scores = model(tokens[None, :-1]).logits[0, start - 1 :].log_softmax(-1)
    logprobs = scores.gather(1, tokens[start:, None])
    return logprobs.sum().item(), torch.equal(scores.argmax(-1), tokens[start:])


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

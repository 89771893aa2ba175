"""gpt-oss runs natively, and its messages arrive as thinking, text and calls."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from tests.e2e.references import greedy_tokens
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs
from tests.mxfp4_fixture import write_mxfp4

MARKERS = [
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
]
SYSTEM = "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>"
TEMPLATE = (
    f"{SYSTEM}"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QUESTION = "Is the dog asleep?"
PROMPT = f"{SYSTEM}<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"asleep": {"type": "boolean"}, "sun": {"enum": ["warm", "cold"]}},
    "required": ["asleep", "sun"],
    "additionalProperties": False,
}
BUDGET = 6
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def tokenizer(model_dirs: ModelDirs) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model_dirs.get("llama") / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKERS)
    return tokenizer


@pytest.fixture(scope="module")
def published(
    model_dirs: ModelDirs, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model with experts in MXFP4, and the same with plain numbers."""
    ends = [tokenizer.token_to_id(marker) for marker in ("<|return|>", "<|call|>")]
    directory = model_dirs.get("gpt_oss", vocab_size=tokenizer.get_vocab_size(), eos_token_id=ends)
    packed, plain = write_mxfp4(directory, tmp_path_factory.mktemp("gpt_oss"))
    tokenizer.save(str(packed / "tokenizer.json"))
    (packed / "chat_template.jinja").write_text(TEMPLATE)
    return packed, plain


@pytest.fixture(scope="module")
def served(published: tuple[Path, Path], run_dir: Callable[[], Path]) -> Iterator[Service]:
    worker = ["--num-blocks=128"]
    with Service(run_dir(), published[0], worker=worker) as service:
        assert "transformers runs the model" not in service.worker.log
        yield service


@pytest.fixture(scope="module")
def client(served: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


@pytest.fixture(scope="module")
def leaning(tokenizer: Tokenizer) -> dict[str, int]:
    """Biases by which a random model thinks, calls and answers where the grammar allows it."""
    return {
        str(token_id): bias
        for word, bias in (("analysis", 90), (" to=functions", 60), ("final", 30))
        for token_id in range(tokenizer.get_vocab_size())
        if (text := tokenizer.decode([token_id])) and word.startswith(text)
    }


def test_greedy_tokens_of_a_chat_equal_transformers(
    served: Service, client: openai.OpenAI, published: tuple[Path, Path], tokenizer: Tokenizer
):
    answer = client.chat.completions.create(
        model=served.model, messages=MESSAGES, temperature=0, max_tokens=NUM_TOKENS
    )
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    (tokens,) = greedy_tokens(published[1], [prompt], NUM_TOKENS)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == tokenizer.decode(tokens)


def test_thinking_comes_before_an_answer_with_a_form(
    served: Service, client: openai.OpenAI, leaning: dict[str, int]
):
    chunks = client.chat.completions.create(
        model=served.model,
        messages=MESSAGES,
        temperature=0,
        logit_bias=leaning,
        response_format={"type": "json_schema", "json_schema": {"name": "dog", "schema": SCHEMA}},
        extra_body={"thinking_budget": BUDGET},
        stream=True,
    )
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
    thought, text = (
        "".join(delta.get(name) or "" for delta in deltas)
        for name in ("reasoning_content", "content")
    )
    assert thought == BUDGET * "a", "as the biases have it"
    jsonschema.validate(json.loads(text), SCHEMA)


def test_thinking_comes_before_a_call(
    served: Service, client: openai.OpenAI, leaning: dict[str, int]
):
    answer = client.chat.completions.create(
        model=served.model,
        messages=MESSAGES,
        temperature=0,
        logit_bias=leaning,
        tools=[{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
        tool_choice="required",
        extra_body={"thinking_budget": BUDGET},
    )
    (choice,) = answer.choices
    assert choice.message.model_dump()["reasoning_content"] == BUDGET * "a"
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "look"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)

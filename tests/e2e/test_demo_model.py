"""SmolLM2-135M-Instruct, the model of `quire up --demo`; skipped where it was not fetched."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from model_files.locate import DEFAULT_CACHE_DIR, find_model
from quire.cli.up.demo_model import FILE
from router.text.tokenizer import load_tokenizer
from tests.e2e.service import Service
from tests.unit.gpu_worker.models.paged_loop import PagedLoop, Sequence, load

MODEL = DEFAULT_CACHE_DIR.expanduser() / FILE
pytestmark = pytest.mark.skipif(
    not MODEL.is_file(), reason=f"SmolLM2 is not at {MODEL}: `quire up --demo` fetches it"
)

QUESTIONS = ("What is the capital of France?", "def fibonacci(n):")
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back. "
NUM_TOKENS = 128


@pytest.fixture(scope="module")
def service(run_dir):
    flags = ["--dtype=auto", "--served-model-name=m", "--num-blocks=600"]
    with Service(run_dir(), MODEL, worker=flags, router=["--served-model-name=m"]) as service:
        yield service


def ask(service, question, **fields):
    messages = [{"role": "user", "content": question}]
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 48, **fields}
    answer = service.post_json("/v1/chat/completions", body)
    return answer["choices"][0], answer["usage"]["prompt_tokens"]


def test_a_chat_is_answered_in_english(service):
    choice, _ = ask(service, QUESTIONS[0])
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"


def test_an_answer_has_the_asked_form(service):
    fruits = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}
    schema = {"type": "object", "properties": {"fruits": fruits}, "required": ["fruits"]}
    form = {"type": "json_schema", "json_schema": {"name": "fruits", "schema": schema}}
    choice, _ = ask(service, "Name three fruits as JSON.", response_format=form)
    assert "banana" in json.loads(choice["message"]["content"])["fruits"]


def test_a_fact_is_found_among_4000_tokens(service):
    fact = "The secret number of the library is 4831. Remember it. "
    text = f"{FILLER * 90}{fact}{FILLER * 90}\nWhat is the secret number of the library?"
    choice, num_prompt_tokens = ask(service, text, max_tokens=16)
    assert num_prompt_tokens > 4000
    assert "4831" in choice["message"]["content"]


@torch.inference_mode()
def test_tokens_and_perplexity_equal_those_of_transformers(tmp_path):
    directory = find_model(str(MODEL), tmp_path)
    tokenizer = load_tokenizer(directory)
    sequences = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.chat_template.render(messages)
        sequences.append(Sequence(tokenizer.encode(prompt, add_special_tokens=False)))
    PagedLoop(load(directory), block_size=16).generate(sequences, NUM_TOKENS, chunk_len=64)
    reference = AutoModelForCausalLM.from_pretrained(
        MODEL.parent,
        gguf_file=MODEL.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    for sequence in sequences:
        tokens = torch.tensor(sequence.tokens)
        logits = reference(tokens[None, :-1]).logits[0]
        assert logits[len(sequence.prompt) - 1 :].argmax(-1).tolist() == sequence.output
        losses = (
            torch.nn.functional.cross_entropy(each, tokens[1:]).item()
            for each in (torch.stack(sequence.logits), logits)
        )
        assert next(losses) == pytest.approx(next(losses), rel=1e-4)

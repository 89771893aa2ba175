"""Log-probabilities of prompts equal those of `transformers`, however the prompt is computed."""

import asyncio
import json
import random
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.generation import generate_request
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

NUM_TOP = 3


def expected(directory: Path, prompt: list[int]) -> torch.Tensor:
    """float32[len(prompt) - 1, V]: the model's log-probabilities for each token but the first."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def check(scores, prompt: list[int], reference: torch.Tensor) -> None:
    assert len(scores) == len(prompt) - 1
    for entry, token_id, row in zip(scores, prompt[1:], reference, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        top = row.topk(NUM_TOP)
        assert list(entry.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-4)
        assert list(entry.top_token_ids) == top.indices.tolist()


async def generate(service: Service, prompts: list[list[int]], **options):
    """Each prompt's scores and output; all requests run at once."""

    async def one(stub, prompt):
        scores, tokens = None, []
        request = generate_request(prompt, prompt_logprobs=NUM_TOP, ignore_eos=True, **options)
        async for response in stub.Generate(request):
            match response.WhichOneof("event"):
                case "prompt":
                    assert scores is None, "twice"
                    assert not tokens, "after a token"
                    scores = list(response.prompt.logprobs)
                case "delta":
                    tokens += response.delta.token_ids
        return scores, tokens

    async with service.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        return await asyncio.gather(*(one(stub, prompt) for prompt in prompts))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts, some with a common prefix, which the service must compute although it is cached."""
    draw = random.Random(1)
    common = [draw.randrange(5, 500) for _ in range(64)]
    lengths = (1, 2, 40, 150)
    return [[draw.randrange(5, 500) for _ in range(length)] for length in lengths] + [
        [*common, 7],
        [*common, 8, 9],
    ]


@pytest.mark.parametrize(
    "worker",
    [[], ["--max-num-batched-tokens=16", "--max-num-seqs=8"], ["--num-blocks=14"]],
    ids=["at once", "in chunks", "preempted"],
)
async def test_scores_are_those_of_transformers(
    worker: list[str], prompts, model_dirs: ModelDirs, run_dir: Callable[[], Path]
):
    directory = model_dirs.get("llama")
    references = [expected(directory, prompt) for prompt in prompts]
    with Service(run_dir(), directory, worker=["--dtype=float32", *worker]) as service:

        def preemptions() -> float:
            return service.metrics(service.scheduler)["quire_num_preemptions_total"]

        is_tight = "--num-blocks=14" in worker
        for _ in range(10 if is_tight else 1):  # until some were preempted
            results = await generate(service, prompts, max_tokens=40)
            results += await generate(service, prompts[-2:], max_tokens=2)
            for (scores, _), prompt, reference in zip(
                results, prompts + prompts[-2:], references + references[-2:], strict=True
            ):
                check(scores, prompt, reference)
            if preemptions():
                break
        assert bool(preemptions()) == is_tight


def test_an_echoed_prompt_comes_with_its_scores(service: Service):
    prompt = "def add(first, second):"
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    http = urllib.request.Request(
        f"{service.url}/v1/completions",
        json.dumps({**body, "prompt_logprobs": 2}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(http, timeout=30) as response:
        (choice,) = json.load(response)["choices"]
    assert choice["text"].startswith(prompt)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]).endswith(choice["text"][len(prompt) :])
    num_prompt = len(choice["prompt_logprobs"])
    assert len(logprobs["tokens"]) == num_prompt + 2
    for shown, score in zip(
        choice["prompt_logprobs"][1:], logprobs["token_logprobs"][1:num_prompt], strict=True
    ):
        assert score == pytest.approx(next(iter(shown.values()))["logprob"])

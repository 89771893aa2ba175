"""Vectors of a decoder equal those of `transformers`, under any other load."""

import asyncio
import base64
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
import torch
from langchain_openai import OpenAIEmbeddings

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import START_S, eventually
from tests.e2e.generation import generate_request
from tests.e2e.service import Service
from tests.models_fixture import ModelDirs

KINDS = {
    "last": common_pb2.POOLING_KIND_LAST,
    "mean": common_pb2.POOLING_KIND_MEAN,
    "cls": common_pb2.POOLING_KIND_CLS,
}
TEXTS = ["A quire is a gathering of pages.", "def add(a, b):", "Grüße aus Köln"]


@pytest.fixture(scope="module")
def decoder(model_dirs: ModelDirs) -> Path:
    return model_dirs.get("qwen3")


@pytest.fixture(scope="module")
def embedder(decoder: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service with short steps, so that prompts are computed in chunks, and with few blocks."""
    flags = ("--num-blocks=48", "--max-num-batched-tokens=48", "--max-num-seqs=8")
    host = "--host-kv-memory-gb=0.01"
    swaps = "--preemption-mode=swap"
    with Service(run_dir(), decoder, worker=(*flags, host), scheduler=(swaps,)) as service:
        yield service


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(5)
    lengths = (1, 2, 7, 40, 90, 130, 200, 300)
    return [[draw.randrange(5, 500) for _ in range(length)] for length in lengths]


def references(directory: Path, prompts: list[list[int]], kind: str) -> list[np.ndarray]:
    """The vectors that `transformers` makes of prompts, not normalized."""
    from transformers import AutoModel  # noqa: PLC0415

    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    pool = {"last": lambda h: h[-1], "mean": lambda h: h.mean(0), "cls": lambda h: h[0]}[kind]
    with torch.inference_mode():
        return [
            pool(model(torch.tensor([prompt])).last_hidden_state[0]).numpy() for prompt in prompts
        ]


async def embed(
    stub: InferenceServiceStub, prompts: list[list[int]], kind: str, **options
) -> list[np.ndarray]:
    inputs = [
        inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=prompt)) for prompt in prompts
    ]
    request = inference_pb2.EmbedRequest(inputs=inputs, pooling=KINDS[kind], **options)
    response = await stub.Embed(request, timeout=START_S)
    assert response.usage.prompt_tokens == sum(map(len, prompts))
    assert response.usage.completion_tokens == 0
    return [np.array(each.values, np.float32) for each in response.embeddings]


@pytest.mark.parametrize("kind", KINDS)
async def test_vectors_equal_transformers_alone_and_beside_generation(
    embedder: Service, decoder: Path, prompts: list[list[int]], kind: str
):
    async with embedder.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        alone = [(await embed(stub, [prompt], kind, normalize=False))[0] for prompt in prompts]
        streams = [
            stub.Generate(generate_request([9, 8, 7 + i], max_tokens=60, ignore_eos=True))
            for i in range(3)
        ]

        async def read(stream) -> int:
            return len([event async for event in stream])

        counts, together = await asyncio.gather(
            asyncio.gather(*map(read, streams)), embed(stub, prompts, kind, normalize=False)
        )
    assert min(counts) > 1
    for vector, other, expected in zip(
        alone, together, references(decoder, prompts, kind), strict=True
    ):
        np.testing.assert_allclose(vector, expected, atol=1e-5, rtol=1e-5)
        assert vector.tobytes() == other.tobytes(), "it depends on other requests"


async def test_preempted_inputs_start_over(
    embedder: Service, decoder: Path, prompts: list[list[int]]
):
    """Two of the prompts fit the pool, while streams beside them grow until no block is free."""
    before = embedder.metrics(embedder.scheduler)["quire_num_preemptions_total"]
    async with embedder.aio_channel() as channel:
        stub = InferenceServiceStub(channel)
        streams = [
            stub.Generate(generate_request([9, 8, 7 + i], max_tokens=180, ignore_eos=True))
            for i in range(6)
        ]

        async def drain(stream) -> None:
            async for _ in stream:
                pass

        _, vectors = await asyncio.gather(
            asyncio.gather(*map(drain, streams)), embed(stub, prompts, "mean", normalize=False)
        )
    assert embedder.metrics(embedder.scheduler)["quire_num_preemptions_total"] > before
    for vector, expected in zip(vectors, references(decoder, prompts, "mean"), strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-5, rtol=1e-5)
    await asyncio.to_thread(embedder.wait_until_idle)


@pytest.mark.parametrize("lost", ["worker", "scheduler"])
async def test_no_input_is_lost_with_a_process(
    embedder: Service, decoder: Path, prompts: list[list[int]], lost: str
):
    async with embedder.aio_channel() as channel:
        embedder.worker.signal(signal.SIGSTOP)
        inputs = embed(InferenceServiceStub(channel), prompts, "mean", normalize=False)
        task = asyncio.create_task(inputs)
        await asyncio.to_thread(_wait_live, embedder, len(prompts))
        if lost == "worker":
            embedder.worker.kill()
            embedder.start_worker()
        else:
            embedder.scheduler.kill()
            embedder.worker.signal(signal.SIGCONT)
            embedder.start_scheduler()
        vectors = await task
    for vector, expected in zip(vectors, references(decoder, prompts, "mean"), strict=True):
        np.testing.assert_allclose(vector, expected, atol=1e-5, rtol=1e-5)


def _wait_live(service: Service, count: int) -> None:
    eventually(
        lambda: service.metrics(service.router)["quire_num_requests_live"] >= count or None,
        "all inputs are live",
    )


@pytest.fixture(scope="module")
def client(embedder: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai(client: openai.OpenAI, embedder: Service, decoder: Path):
    answer = client.embeddings.create(model=embedder.model, input=TEXTS)
    assert [each.index for each in answer.data] == [0, 1, 2]
    ids = [embedder.post_json("/tokenize", {"prompt": text})["tokens"] for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for each, expected in zip(answer.data, references(decoder, ids, "last"), strict=True):
        unit = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(each.embedding, unit, atol=1e-5)
    tokens = client.embeddings.create(model=embedder.model, input=ids, encoding_format="float")
    whole = np.array(answer.data[0].embedding)
    np.testing.assert_allclose(tokens.data[0].embedding, whole, atol=1e-7)
    short = client.embeddings.create(model=embedder.model, input=TEXTS[0], dimensions=16)
    cut = whole[:16] / np.linalg.norm(whole[:16])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-6)


def test_base64(embedder: Service):
    body = {"input": TEXTS[0], "model": embedder.model}
    numbers = embedder.post_json("/v1/embeddings", body)["data"][0]["embedding"]
    text = embedder.post_json("/v1/embeddings", {**body, "encoding_format": "base64"})
    packed = np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), "<f4")
    assert packed.tolist() == numbers


def test_langchain(embedder: Service):
    embeddings = OpenAIEmbeddings(
        base_url=f"{embedder.url}/v1",
        api_key="none",
        model=embedder.model,
        check_embedding_ctx_length=False,  # otherwise it sends tokens of OpenAI's models
    )
    vectors = embeddings.embed_documents(TEXTS)
    assert len(vectors) == len(TEXTS)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), vectors[1], atol=1e-7)


def test_similar_texts_score_higher(embedder: Service):
    ranking = embedder.post_json(
        "/rerank", {"query": TEXTS[0], "documents": [TEXTS[1], TEXTS[0]], "top_n": 1}
    )
    (best,) = ranking["results"]
    assert best["index"] == 1
    assert best["document"] == {"text": TEXTS[0]}
    assert best["relevance_score"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"input": []}, "input is []; it must be a string, token ids, or a list of either"),
        ({"input": ["x"] * 2049}, "input holds 2049 prompts; one call takes at most 2048"),
        ({"input": ["x", ""]}, "input[1] is empty"),
        ({"input": [[5], [500]]}, "input[1][0] is 500; it must be in [0, 500)"),
        ({"input": [5] * 512}, "input has 512 tokens; it must have at most 511"),
        ({"input": "x", "dimensions": 65}, "dimensions is 65; it must be in [1, 64]"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "temperature": 1}, "temperature is 1; there is no such field"),
    ],
)
def test_refusals(client: openai.OpenAI, body, problem: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body=body, cast_to=object)
    assert problem in caught.value.message


def test_a_model_that_makes_no_scores_says_so(embedder: Service):
    request = generate_request([5], max_tokens=1)
    request.sampling.pooling.kind = common_pb2.POOLING_KIND_LAST
    with pytest.raises(grpc.RpcError) as caught:
        list(embedder.stub.Generate(request))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "call Embed" in caught.value.details()
    models = embedder.stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert list(models[0].tasks) == [common_pb2.TASK_GENERATE, common_pb2.TASK_EMBED]
    assert models[0].embedding_size == 64


def test_truncation_keeps_the_beginning(embedder: Service):
    ids = list(range(5, 105))
    cut = embedder.post_json("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": 20})
    whole = embedder.post_json("/v1/embeddings", {"input": ids[:20]})
    assert cut["data"] == whole["data"]
    assert cut["usage"]["prompt_tokens"] == 20

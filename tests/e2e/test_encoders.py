"""Encoders: vectors of BERT and scores of XLM-RoBERTa equal those of `transformers`."""

import json
import random
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from quire.v1 import common_pb2, inference_pb2
from tests.e2e.service import Service
from tests.encoders_fixture import LONGEST, TEXTS, make_encoder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("bert"), "BertModel")


@pytest.fixture(scope="module")
def embedder(bert: Path, run_dir: Callable[[], Path]) -> Iterator[Service]:
    """A service whose steps hold one or two of the longest inputs."""
    flags = (f"--max-num-batched-tokens={LONGEST + 20}", "--max-num-seqs=8")
    with Service(run_dir(), bert, worker=flags) as service:
        yield service


def refused(service: Service, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and body of a POST that fails."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        service.post_json(path, body)
    return caught.value.code, json.loads(caught.value.read())


def vectors_of(directory: Path, inputs: list[list[int]]) -> list[np.ndarray]:
    """The hidden states of each input, `[T, E]`, as `transformers` computes them."""
    from transformers import AutoModel  # noqa: PLC0415

    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in inputs]


@pytest.mark.parametrize(
    ("kind", "pool"),
    [("mean", lambda h: h.mean(0)), ("cls", lambda h: h[0]), ("last", lambda h: h[-1])],
)
def test_vectors_equal_transformers(embedder: Service, bert: Path, kind: str, pool):
    draw = random.Random(4)
    inputs = [[draw.randrange(4, 60) for _ in range(n)] for n in (1, 5, 40, LONGEST, LONGEST, 30)]
    body = {"input": inputs, "pooling": kind, "normalize": False}
    together = embedder.post_json("/v1/embeddings", body)["data"]
    for ids, each, hidden in zip(inputs, together, vectors_of(bert, inputs), strict=True):
        np.testing.assert_allclose(each["embedding"], pool(hidden), atol=1e-5, rtol=1e-5)
        alone = embedder.post_json("/v1/embeddings", {**body, "input": ids})["data"][0]
        np.testing.assert_allclose(alone["embedding"], each["embedding"], atol=1e-6)
    load = embedder.wait_until_idle()
    assert load.num_free_blocks == load.num_blocks  # no block is held or cached


def test_the_default_is_the_normalized_mean(embedder: Service, bert: Path):
    (ids,) = [embedder.post_json("/tokenize", {"prompt": TEXTS[0]})["tokens"]]
    made = embedder.post_json("/v1/embeddings", {"input": TEXTS[0]})["data"][0]["embedding"]
    mean = vectors_of(bert, [ids])[0].mean(0)
    np.testing.assert_allclose(made, mean / np.linalg.norm(mean), atol=1e-5)


def test_what_an_encoder_cannot_do_is_refused_by_name(embedder: Service):
    longer = {"input": [5] * (LONGEST + 1)}
    for path, body, problem in (
        (
            "/v1/embeddings",
            longer,
            f"input has {LONGEST + 1} tokens; it must have at most {LONGEST}",
        ),
        ("/v1/completions", {"prompt": "x"}, "cannot generate; it can embed"),
    ):
        status, answer = refused(embedder, path, body)
        assert status == 400
        assert problem in answer["error"]["message"]
    (model,) = embedder.stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert list(model.tasks) == [common_pb2.TASK_EMBED]
    assert model.max_model_len == LONGEST
    assert (model.embedding_size, model.pooling.kind) == (32, common_pb2.POOLING_KIND_MEAN)


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_scores_equal_transformers(family: str, tmp_path: Path, run_dir: Callable[[], Path]):
    from transformers import AutoModelForSequenceClassification  # noqa: PLC0415

    directory = make_encoder(tmp_path / family, f"{family}ForSequenceClassification", num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def expected(one: str, two: str) -> float:
        pair = tokenizer.encode(one, two)
        types = {} if family == "XLMRoberta" else {"token_type_ids": torch.tensor([pair.type_ids])}
        with torch.inference_mode():
            return model(torch.tensor([pair.ids]), **types).logits.sigmoid().item()

    with Service(run_dir(), directory) as service:
        scores = service.post_json("/score", {"text_1": TEXTS[0], "text_2": TEXTS})["data"]
        for each, text in zip(scores, TEXTS, strict=True):
            assert each["score"] == pytest.approx(expected(TEXTS[0], text), abs=1e-5)
        ranking = service.post_json("/v1/rerank", {"query": TEXTS[1], "documents": TEXTS})
        found = {each["index"]: each["relevance_score"] for each in ranking["results"]}
        assert list(found.values()) == sorted(found.values(), reverse=True)
        for i, text in enumerate(TEXTS):
            assert found[i] == pytest.approx(expected(TEXTS[1], text), abs=1e-5)
        cut = {"text_1": "A quire", "text_2": "pages " * 100, "truncate_prompt_tokens": -1}
        (kept,) = service.post_json("/score", cut)["data"]
        assert 0 < kept["score"] < 1
        assert refused(service, "/v1/embeddings", {"input": "x"})[0] == 400

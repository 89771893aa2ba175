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
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from quire.v1 import common_pb2, inference_pb2
from tests.e2e.service import Service

TEXTS = [
    "A quire is a gathering of pages.",
    "Several quires make a book.",
    "The dog sleeps in the sun.",
]
LONGEST = 62


def make_encoder(directory: Path, architecture: str, **fields: Any) -> Path:
    """Write a random encoder of `transformers`, and a tokenizer with token types."""
    import transformers  # noqa: PLC0415

    config_class = "XLMRobertaConfig" if architecture.startswith("XLM") else "BertConfig"
    config = getattr(transformers, config_class)(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.3,
        pad_token_id=1,
        max_position_embeddings=LONGEST + 2 * architecture.startswith("XLM"),
        type_vocab_size=1 if architecture.startswith("XLM") else 2,
        **fields,
    )
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if "LayerNorm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]"}))
    return directory


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
    assert load.num_free_blocks == load.num_blocks  # nothing is kept


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

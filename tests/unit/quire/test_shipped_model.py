"""The model in the repository is complete, small, and consistent with its files."""

import json
from pathlib import Path

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from quire.cli.up.layout import SHIPPED_MODEL

MAX_BYTES = 16 * 1024 * 1024


def read_json(name: str) -> dict:
    return json.loads((SHIPPED_MODEL / name).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer.json"))


def test_it_is_small_enough_for_the_repository():
    assert sum(file.stat().st_size for file in SHIPPED_MODEL.iterdir()) <= MAX_BYTES


def test_weights_fit_the_config():
    config = read_json("config.json")
    with safe_open(SHIPPED_MODEL / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert embedding.get_dtype() == "BF16"
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in names
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    assert layers == {str(i) for i in range(config["num_hidden_layers"])}


def test_special_tokens_agree(tokenizer):
    config, names = read_json("config.json"), read_json("tokenizer_config.json")
    assert tokenizer.token_to_id(names["bos_token"]) == config["bos_token_id"]
    assert tokenizer.token_to_id(names["eos_token"]) == config["eos_token_id"]
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert names["model_max_length"] == config["max_position_embeddings"]


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    return x\n", "\tif a:\n\t\tb  # é 你好 🙂\r\n", "   ", "\n\n\n", "\x00"],
)
def test_tokenizer_gives_back_every_text_after_its_begin_token(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert ids[0] == read_json("config.json")["bos_token_id"]
    assert tokenizer.decode(ids) == text


def test_chat_is_comments_and_code():
    names = read_json("tokenizer_config.json")
    rendered = (
        jinja2.Environment()
        .from_string(names["chat_template"])
        .render(
            messages=[
                {"role": "user", "content": "Return the sum\nof two numbers."},
                {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"},
                {"role": "user", "content": "Return the difference."},
            ],
            bos_token=names["bos_token"],
            add_generation_prompt=True,
        )
    )
    assert rendered == (
        names["bos_token"] + "# Return the sum\n# of two numbers.\n"
        "def add(a, b):\n    return a + b\n\n\n"
        "# Return the difference.\n"
    )


def test_model_card_states_data_licence_and_loss():
    card = (SHIPPED_MODEL / "README.md").read_text()
    for word in ("PSF License", "Apache-2.0", "Loss, held out", "models/train.py"):
        assert word in card


def test_nothing_else_is_in_the_directory():
    assert {file.name for file in Path(SHIPPED_MODEL).iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }

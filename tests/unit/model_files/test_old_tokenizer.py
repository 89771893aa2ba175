"""Tokenizers in files from before tokenizer.json are converted once."""

import base64
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import import_protobuf

from model_files import old_tokenizer
from model_files.errors import ModelError
from model_files.locate import find_model
from router.text.tokenizer import load_tokenizer

TEXTS = ["A quire is a gathering of pages.", "the lazy dogs: naïve café, 你好"]
BYTES = pre_tokenizers.ByteLevel.alphabet()


def trained():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=BYTES, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def write_bytes_and_merges(directory):
    trained().model.save(str(directory))
    return {"model_type": "gpt2"}, {"tokenizer_class": "GPT2Tokenizer"}


def write_words(directory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "quire", "is", "the", "##s", "dog"]
    (directory / "vocab.txt").write_text("\n".join([*words, "lazy", ".", ":"]))
    return {"model_type": "bert"}, {"tokenizer_class": "BertTokenizer"}


def write_ranks(directory):
    pairs = [b"qu", b"re", b"he", b" t", b" the"]
    ranks = [bytes([byte]) for byte in range(256)] + pairs
    lines = (f"{base64.b64encode(part).decode()} {rank}" for rank, part in enumerate(ranks))
    (directory / "tokenizer.model").write_text("\n".join(lines))
    return {"model_type": "llama"}, {"tokenizer_class": "PreTrainedTokenizerFast"}


def write_tekken(directory):
    parts = [bytes([byte]) for byte in range(256)] + [b"qu", b"re", b"he", b" t", b" the"]
    specials = ["<unk>", "<s>", "</s>", "[INST]"]
    contents = {
        "config": {
            "pattern": r"\s?\p{L}+|\p{N}|[^\p{L}\p{N}]+",
            "default_vocab_size": len(parts) + 8,
            "default_num_special_tokens": 8,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(part).decode()}
            for rank, part in enumerate(parts)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True}
            for rank, name in enumerate(specials)
        ],
    }
    (directory / "tekken.json").write_text(json.dumps(contents))
    (directory / "chat_template.jinja").write_text("{{ bos_token }}[INST]")
    return {"model_type": "mistral"}, None


def write_pieces(directory):
    model = import_protobuf().ModelProto()
    pieces = [
        ("<unk>", 2),
        ("<s>", 3),
        ("</s>", 3),
        *((f"<0x{byte:02X}>", 6) for byte in range(256)),
    ]
    pieces += [(piece, 1) for piece in ("▁t", "he", "▁the", *"▁abcdefghiklmnopqrstuz.:")]
    for rank, (piece, kind) in enumerate(pieces):
        model.pieces.add(piece=piece, type=kind, score=-float(rank))
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = 0
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())
    return {"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer"}


@pytest.fixture
def model(tmp_path):
    """Makes a model without tokenizer.json, from a function that writes its tokenizer."""

    def make(write):
        directory = tmp_path / "model"
        directory.mkdir()
        config, tokenizer_config = write(directory)
        (directory / "config.json").write_text(json.dumps(config))
        if tokenizer_config is not None:
            (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return directory

    return make


@pytest.mark.parametrize(
    "write", [write_bytes_and_merges, write_words, write_ranks, write_pieces, write_tekken]
)
def test_a_tokenizer_in_older_files_is_that_of_transformers(model, tmp_path, write):
    if write is write_pieces:
        pytest.importorskip("sentencepiece")
    directory = model(write)
    found = find_model(str(directory), tmp_path / "cache")
    ours, theirs = load_tokenizer(found), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert len(ours.encode(text)) > 3
    assert (found / "config.json").read_text() == (directory / "config.json").read_text()


def test_templates_know_the_special_tokens_of_tekken(model, tmp_path):
    directory = model(write_tekken)
    tokenizer = load_tokenizer(find_model(str(directory), tmp_path / "cache"))
    assert tokenizer.chat_template.render([]) == "<s>[INST]"
    assert tokenizer.encode("<s>[INST]") == [1, 3]
    assert tokenizer.is_special("[INST]")
    assert not (directory / "special_tokens_map.json").exists()


def test_a_tekken_without_its_special_tokens_is_refused(model, tmp_path):
    directory = model(write_tekken)
    tekken = json.loads((directory / "tekken.json").read_text())
    del tekken["special_tokens"]
    (directory / "tekken.json").write_text(json.dumps(tekken))
    problem = r"tekken\.json cannot be converted to tokenizer\.json: .*mistral-common"
    with pytest.raises(ModelError, match=problem):
        find_model(str(directory), tmp_path / "cache")


def test_it_is_converted_once_and_later_files_are_there(model, tmp_path, monkeypatch):
    program = "import sys; open(sys.argv[2], 'w').close()"
    monkeypatch.setattr(old_tokenizer, "_PROGRAM", program)
    directory = model(write_words)
    found = find_model(str(directory), tmp_path / "cache")
    (directory / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(old_tokenizer.sys, "executable", "/nowhere")
    assert find_model(str(directory), tmp_path / "cache") == found
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert not (directory / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("write", "package"),
    [(write_pieces, "sentencepiece"), (write_ranks, "tiktoken"), (write_words, "transformers")],
)
def test_a_missing_package_is_named(model, tmp_path, monkeypatch, write, package):
    monkeypatch.setattr(old_tokenizer.importlib.util, "find_spec", lambda name: name != package)
    with pytest.raises(
        ModelError, match=f"has no tokenizer.json; to convert .* install {package}`"
    ):
        find_model(str(model(write)), tmp_path / "cache")


def test_what_cannot_be_converted_is_named(model, tmp_path):
    directory = model(write_bytes_and_merges)
    (directory / "vocab.json").write_text("no JSON")
    problem = r"vocab\.json and merges\.txt cannot be converted to tokenizer\.json: ."
    with pytest.raises(ModelError, match=problem):
        find_model(str(directory), tmp_path / "cache")
    (tmp_path / "occupied").write_text("")
    with pytest.raises(ModelError, match="occupied, which cannot be written"):
        find_model(str(directory), tmp_path / "occupied")


def test_what_cannot_be_read_or_started_is_no_fault_of_the_cache(model, tmp_path, monkeypatch):
    directory = model(write_words)
    with monkeypatch.context() as change:
        change.setattr(old_tokenizer.sys, "executable", "/nowhere")
        with pytest.raises(ModelError, match="to convert its tokenizer, /nowhere is needed: No"):
            find_model(str(directory), tmp_path / "cache")
    gone = directory / "tokenizer.model"
    monkeypatch.setattr(old_tokenizer, "_old_files", lambda _: [gone])
    with pytest.raises(ModelError, match=rf"has no tokenizer\.json; .* {gone} is needed: No such"):
        find_model(str(directory), tmp_path / "cache")


def test_ids_of_a_tekken_file_start_with_its_special_tokens(model, tmp_path):
    tokenizer = load_tokenizer(find_model(str(model(write_tekken)), tmp_path / "cache"))
    the, first_byte = 8 + 256 + 4, 8
    assert tokenizer.encode("[INST]a the") == [3, first_byte + ord("a"), the]

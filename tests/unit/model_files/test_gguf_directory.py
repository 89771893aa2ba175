"""What is derived from a GGUF file's metadata, and how damaged files are refused."""

import json
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from model_files.errors import ModelError
from model_files.gguf_config import to_config
from model_files.gguf_header import GgufHeader, read_header
from model_files.gguf_tokenizer import to_tokenizer
from model_files.locate import find_model
from tests.gguf_fixture import SIZES, write_gguf
from tests.models_fixture import make_model

TEXTS = (
    "def add(a, b):\n    return a + b\n",
    "  Two  spaces, 12345 digits; it's naïve — 你好 🙂",
    "<|user|>hello</s> and <|assistant|>",
    "",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama", **SIZES)


@pytest.fixture
def lay_out(llama, tmp_path):
    def make(**metadata):
        file = write_gguf(llama, tmp_path / "tiny.gguf", "Q8_0", **metadata)
        return find_model(str(file), tmp_path / "cache")

    return make


def test_tokenizer_and_template_are_those_that_the_file_was_made_from(lay_out, llama):
    directory = lay_out()
    ours, original = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (directory, llama))
    for text in TEXTS:
        for special in (True, False):
            expected = original.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special).ids == expected
            decoded = original.decode(expected, skip_special_tokens=special)
            assert ours.decode(expected, skip_special_tokens=special) == decoded
    settings, expected_settings = (
        json.loads((d / "tokenizer_config.json").read_text()) for d in (directory, llama)
    )
    for name in ("chat_template", "bos_token", "eos_token"):
        assert settings[name] == expected_settings[name]


def test_config_is_that_of_the_model(lay_out, llama):
    directory = lay_out()
    config, original = (json.loads((d / "config.json").read_text()) for d in (directory, llama))
    names = ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "head_dim")
    assert {name: config[name] for name in names} == {name: original[name] for name in names}
    assert config["rms_norm_eps"] == pytest.approx(original["rms_norm_eps"])
    assert config["eos_token_id"] == [original["eos_token_id"]]
    assert config["quantization_config"] == {"quant_method": "gguf"}


def gemma_config(architecture, num_layers, kind="F32", **fields):
    sizes = {"context_length": 4096, "embedding_length": 5376, "feed_forward_length": 64}
    attention = {"head_count": 32, "key_length": 128, "layer_norm_rms_epsilon": 1e-6}
    sizes |= {f"attention.{name}": value for name, value in attention.items()}
    fields = sizes | {"block_count": num_layers} | fields
    metadata = {f"{architecture}.{name}": value for name, value in fields.items()}
    plain = SimpleNamespace(shape=(100, 5376), type=SimpleNamespace(name=kind, is_quantized=False))
    return to_config(
        GgufHeader(
            path=Path("g.gguf"),
            metadata=metadata | {"general.architecture": architecture},
            tensors={"token_embd.weight": plain},
        )
    )


@pytest.mark.parametrize(
    ("architecture", "num_layers", "scalar"),
    [("gemma3", 62, 168), ("gemma3", 48, 128), ("gemma2", 46, 168), ("gemma2", 42, 128)],
)
def test_only_gemmas_of_27b_scale_scores_by_the_hidden_size(architecture, num_layers, scalar):
    assert gemma_config(architecture, num_layers)["query_pre_attn_scalar"] == scalar


def test_the_windows_and_bases_of_gemma_3():
    config = gemma_config("gemma3", 3)
    assert (config["sliding_window"], config["rope_theta"]) == (None, 1e6)
    fields = {"attention.sliding_window": 512, "rope.freq_base": 2e6, "rope.freq_base_swa": 3e4}
    config = gemma_config("gemma3", 3, **fields, **{"attention.sliding_window_pattern": 2})
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 2)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (2e6, 3e4)
    pattern = {"attention.sliding_window_pattern": [True, True, False]}
    config = gemma_config("gemma3", 3, **fields, **pattern)
    assert config["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]


def test_gemma_does_not_compute_in_float16():
    assert gemma_config("gemma3", 3, "F16")["dtype"] == "bfloat16"
    assert gemma_config("gemma3", 3)["dtype"] == "float32"


def test_the_caps_of_gemma_2():
    config = gemma_config("gemma2", 3, attn_logit_softcapping=40.0)
    assert config["attn_logit_softcapping"] == 40.0
    assert "final_logit_softcapping" not in config, "the default holds"
    assert "sliding_window" not in config


def test_a_file_is_laid_out_once_and_again_when_it_changes(llama, tmp_path):
    file = write_gguf(llama, tmp_path / "tiny.gguf", "F16")
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_model(str(file), tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    write_gguf(llama, file, "F32")
    assert find_model(str(file), tmp_path / "cache") not in found


@pytest.mark.parametrize(
    ("pre", "text", "num_words"),
    [("smollm", "a 123", 5), ("llama-bpe", "a 1234", 4), ("qwen2", "12\n\n\nb", 4)],
)
def test_text_is_cut_into_words_as_the_file_says(lay_out, pre, text, num_words):
    tokenizer = Tokenizer.from_file(str(lay_out(**{"tokenizer.ggml.pre": pre}) / "tokenizer.json"))
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert len(words) == num_words, words


def test_sentence_piece_tokens_are_merged_by_score():
    original = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    original.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    original.train_from_iterator([*TEXTS, "the quick brown fox and the dog " * 3], trainer)
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    header = GgufHeader(
        "spm.gguf",
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        },
        {},
    )
    ours = to_tokenizer(header)
    for text in ("the quick fox", "  dog\n and ünï"):
        ids = ours.encode(text).ids
        assert ids[0] == 1  # bos, unless the file says otherwise
        assert ids[1:] == original.encode(text).ids
        assert ours.decode(ids) == text
    assert ours.encode("x</s>").ids[-1] == 2
    del header.metadata["tokenizer.ggml.unknown_token_id"]
    assert to_tokenizer(header).model.unk_token == "<unk>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, r"tiny.gguf: llama.block_count is missing"),
        ({"general.architecture": "mamba"}, r"architecture is 'mamba'; supported: gemma, gem"),
        (
            {"tokenizer.ggml.pre": "viking"},
            r"tokenizer.ggml.pre is 'viking'; supported: default",
        ),
        ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer.ggml.model is 'rwkv'; supported: 'gpt2'"),
        ({"tokenizer.ggml.bos_token_id": 7000}, r"ggml.bos_token_id is 7000; it must be in \[0, 5"),
        ({"llama.rope.dimension_count": 8}, r"llama.rope.dimension_count is 8; supported: 64"),
        ({"llama.rope.scaling.type": "su"}, r"rope.scaling.type is 'su'; supported: none, lin"),
    ],
)
def test_what_is_unsupported_is_refused_by_name(lay_out, metadata, message):
    with pytest.raises(ModelError, match=message):
        lay_out(**metadata)


def test_damaged_files_are_refused(llama, tmp_path):
    whole = write_gguf(llama, tmp_path / "whole.gguf", "Q4_0").read_bytes()
    file = tmp_path / "bad.gguf"
    for content, problem in (
        (b"", "cannot be read"),
        (b"GGML" + whole[4:], "does not begin with GGUF"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "version is 1; supported: 2 and 3"),
        (whole[:8] + b"\xff" * 8 + whole[16:], "it counts 18446744073709551615 items"),
        (whole[:-100], "but the file is cut off at"),
        *((whole[:length], "cannot be read as GGUF") for length in (10, 30, 200, 9000)),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=f"bad.gguf.*{problem}"):
            read_header(file)


def test_a_missing_part_and_a_cache_that_cannot_be_written_are_named(llama, tmp_path):
    first = write_gguf(llama, tmp_path / "x.gguf", "Q8_0", max_tensors=8)
    (tmp_path / "occupied").write_text("")
    with pytest.raises(ModelError, match=r"cache-dir is .*occupied, which cannot be written"):
        find_model(str(first), tmp_path / "occupied")
    first.with_name("x-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"one of 3 files; there is no .*x-00002-of-00003.gguf"):
        find_model(str(first), tmp_path / "cache")

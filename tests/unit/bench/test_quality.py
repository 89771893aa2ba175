"""`bench/quality.py` scores any text with any model."""

import math
import sys

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.models_fixture import make_model

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def parse(monkeypatch, *flags):
    import quality  # noqa: PLC0415

    monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, flags)])
    return quality._parse()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_every_window_has_the_first_token_and_the_rest_of_the_text(model):
    from quality import windows  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin, *ids = tokenizer.encode(TEXT).ids
    found = list(windows(tokenizer, [TEXT, "", TEXT], 8, math.inf))
    assert all(window[0] == begin and 1 < len(window) <= 8 for window in found)
    assert [token for window in found for token in window[1:]] == [*ids, *ids]
    assert list(windows(tokenizer, [TEXT], 8, 10)) == found[:2], "whole windows, until it is enough"


def test_without_a_first_token_the_text_is_cut_only(model):
    from quality import windows  # noqa: PLC0415

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = None
    ids = tokenizer.encode(TEXT).ids
    found = list(windows(tokenizer, [TEXT], 8, math.inf))
    assert found == [ids[start : start + 8] for start in range(0, len(ids), 8)]


async def test_another_model_scores_another_text_as_transformers_does(
    model, text, monkeypatch, capsys
):
    import quality  # noqa: PLC0415

    given = parse(monkeypatch, "--model", model, "--text", text)
    results = await quality.measure(given)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids
    with torch.inference_mode():
        tokens = torch.tensor([ids])
        loss = AutoModelForCausalLM.from_pretrained(model)(tokens, labels=tokens).loss
    assert results["num_tokens"] == len(ids) - 1
    assert results["ppl_fp32"] == pytest.approx(math.exp(loss), rel=1e-4)
    names = {"fp32", "bf16", "int8", "fp8", "weights_int8"}
    assert set(results) == {"num_tokens", *(f"ppl_{name}" for name in names)}
    out = capsys.readouterr().out
    assert "weights_int4 is left out: " in out, "112 input features are no multiple of 32"
    assert "÷ bf16" in out


async def test_a_model_with_two_kv_groups_is_scored(text, monkeypatch, tmp_path):
    import quality  # noqa: PLC0415

    model = make_model(tmp_path / "windows", "gpt_oss")
    given = parse(monkeypatch, "--model", model, "--text", text, "--variants", "fp32")
    results = await quality.measure(given)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids
    with torch.inference_mode():
        tokens = torch.tensor([ids])
        loss = AutoModelForCausalLM.from_pretrained(model)(tokens, labels=tokens).loss
    assert results["ppl_fp32"] == pytest.approx(math.exp(loss), rel=1e-4)


async def test_a_quantized_checkpoint_is_scored_as_it_is(text, monkeypatch, tmp_path, capsys):
    import quality  # noqa: PLC0415
    from quantize import FORMS, write  # noqa: PLC0415

    plain = make_model(tmp_path / "plain", "llama", intermediate_size=128, dtype="bfloat16")
    model = write(plain, tmp_path / "gptq", FORMS["gptq_32"])
    assert parse(monkeypatch, "--model", model).variants == ("as_is", *quality._VARIANTS)
    given = parse(monkeypatch, "--model", model, "--text", text, "--variants", "as_is,fp32,bf16")
    results = await quality.measure(given)
    assert results["ppl_as_is"] == results["ppl_bf16"], "the checkpoint's dtype is bfloat16"
    assert results["ppl_as_is"] != results["ppl_fp32"]
    assert "÷ bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--model", "nowhere"], "--model: nowhere has no config.json"),
        (["--text", "nowhere"], "--text: nowhere is not a file"),
        (["--variants", "bf16,int3"], "--variants: int3: must be one of as_is, fp32"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(monkeypatch, capsys, flags, reason):
    with pytest.raises(SystemExit):
        parse(monkeypatch, *flags)
    assert reason in capsys.readouterr().err


async def test_a_text_of_one_token_has_nothing_to_score(monkeypatch, tmp_path):
    import quality  # noqa: PLC0415
    from harness.case import BenchError  # noqa: PLC0415

    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(BenchError, match="no token to score"):
        await quality.measure(parse(monkeypatch, "--text", empty, "--variants", "bf16"))

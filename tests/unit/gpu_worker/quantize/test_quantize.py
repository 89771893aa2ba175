"""A model quantized for a text: what is written, read by our own reader and by others' rules."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_worker.models.registry import open_model
from gpu_worker.quantize.calibration import Rounding, read_samples, round_layers
from gpu_worker.quantize.checkpoint import write_checkpoint
from gpu_worker.weights.checkpoint import Checkpoint
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.quantized_linear import Quantization
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load, random_prompt

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
FOUR_BITS = Rounding(4, 32)


def progress(*_):
    pass


def samples(num=4, length=24):
    return torch.tensor([random_prompt(length, seed) for seed in range(num)])


def hidden_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def quantize(directory, out, given=None, rounding=FOUR_BITS):
    """Write it; return the model of transformers with the rounded weights."""
    model = hidden_model(directory)
    write_checkpoint(directory, out, round_layers(model, given, rounding, progress), rounding)
    return model


def greedy(directory, num_tokens=12):
    decoder = load(directory)
    sequence = Sequence(random_prompt(20, 7))
    PagedLoop(decoder, 16).generate([sequence], num_tokens)
    return sequence.output


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("given", [None, samples()], ids=["no text", "a text"])
def test_what_is_written_is_the_rounded_model(model_dirs, tmp_path, family, given):
    directory = model_dirs.get(family, **SIZES)
    model = quantize(directory, tmp_path / "out", given)
    prompt = torch.tensor([random_prompt(20, 7)])
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert greedy(tmp_path / "out") == expected[0, 20:].tolist()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_text_keeps_the_outputs_for_it(model_dirs, tmp_path):
    directory = model_dirs.get("llama", **SIZES)
    exact = hidden_model(directory)(samples()).logits.detach()
    lost = {
        name: float(
            (quantize(directory, tmp_path / name, given)(samples()).logits.detach() - exact).norm()
        )
        for name, given in (("fitted", samples()), ("nearest", None))
    }
    assert lost["fitted"] < 0.9 * lost["nearest"]


def test_tensors_that_are_no_maps_stay_as_they_are(model_dirs, tmp_path):
    directory = model_dirs.get("llama", **SIZES)
    quantize(directory, tmp_path / "out")
    before, after = Checkpoint(directory), Checkpoint(tmp_path / "out")
    kept = before.names & after.names
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= kept
    assert not [name for name in kept if name.endswith("proj.weight")]
    for name in kept:
        assert torch.equal(before.whole(name), after.whole(name))


def test_eight_bits_and_large_groups(model_dirs, tmp_path):
    directory = model_dirs.get("llama", **SIZES)
    quantize(directory, tmp_path / "out", samples(), Rounding(8, 64))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["desc_act"]) == (8, 64, False)
    assert greedy(tmp_path / "out") == greedy(directory)


def test_other_maps_are_quantized_when_they_are_read(model_dirs, tmp_path):
    """The map to the vocabulary, which the checkpoint does not pack."""
    quantize(model_dirs.get("llama", **SIZES), tmp_path / "out")
    plain = open_model(tmp_path / "out").load(torch.bfloat16, CPU, lambda _: None)
    packed = open_model(tmp_path / "out", quantization=Quantization.INT8).load(
        torch.bfloat16, CPU, lambda _: None
    )
    x = torch.randn(3, SIZES["hidden_size"]).bfloat16()
    assert not torch.equal(plain.logits(x), packed.logits(x))
    torch.testing.assert_close(plain.logits(x), packed.logits(x), atol=0.05, rtol=0.05)


# What is refused.


def test_group_sizes_that_do_not_divide(model_dirs):
    model = hidden_model(model_dirs.get("llama", **SIZES | {"intermediate_size": 80}))
    message = r"layers\.0\.mlp\.down_proj has 80 input features; group-size is 32"
    with pytest.raises(ModelError, match=message):
        list(round_layers(model, None, FOUR_BITS, progress))


def test_experts_in_one_tensor(model_dirs):
    model = hidden_model(model_dirs.get("mixtral", **SIZES))
    with pytest.raises(ModelError, match=r"experts\.\w+ has 3 dimensions"):
        list(round_layers(model, None, FOUR_BITS, progress))


def test_a_checkpoint_with_other_names(model_dirs, tmp_path):
    directory = model_dirs.get("llama", **SIZES)
    maps = [(f"other.{name}", each) for name, each in
            round_layers(hidden_model(directory), None, FOUR_BITS, progress)]  # fmt: skip
    with pytest.raises(ModelError, match=r"has no other\.model\.layers\.0\.\S+\.weight"):
        write_checkpoint(directory, tmp_path / "out", maps, FOUR_BITS)
    assert not [*tmp_path.iterdir()]


# Samples of a text.


@pytest.fixture
def tokenizer(model_dirs):
    return AutoTokenizer.from_pretrained(model_dirs.get("llama", **SIZES))


def test_samples_are_spread_over_a_long_text(tokenizer, tmp_path):
    text = tmp_path / "text"
    text.write_text("begin " * 500 + "end " * 500)
    begin, end = (
        tokenizer.encode(word * 3, add_special_tokens=False)[-2:] for word in ("begin ", "end ")
    )
    found = read_samples(text, tokenizer, 4, 8)
    assert found.shape == (4, 8)
    assert set(begin) & set(found[0].tolist())
    assert set(end) & set(found[3].tolist())


def test_a_short_text_gives_what_samples_it_has(tokenizer, tmp_path):
    text = tmp_path / "text"
    text.write_text("a b c d e f g h i j")
    num_tokens = len(tokenizer.encode(text.read_text(), add_special_tokens=False))
    assert read_samples(text, tokenizer, 128, 4).shape == (num_tokens // 4, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short", r"a text of 5 characters; it must have at least one sample of 512 tokens"),
        (b"\xff\xfe", r"cannot be read as text"),
        (None, r"cannot be read as text: .*No such file"),
    ],
)
def test_texts_that_will_not_do(tokenizer, tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_samples(path, tokenizer, 128, 512)


# The command.


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", "quantize", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(model_dirs, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(model_dirs.get("llama", **SIZES), directory)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 40)
    arguments = (directory, tmp_path / "out", "--calibrate", text)
    done = run(*arguments, "--sample-length", 16, "--num-samples", 4)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'out'}: " in done.stdout
    assert greedy(tmp_path / "out")
    again = run(*arguments)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    packed = run(tmp_path / "out", tmp_path / "twice")
    assert "the model is quantized already" in packed.stderr

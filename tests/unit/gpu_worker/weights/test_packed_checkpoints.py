"""Quantized checkpoints of other programs: maps and models made of them."""

import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.quantize import FORMS, write
from gpu_worker.models.registry import open_model
from gpu_worker.weights.json_fields import JsonFields, ModelError
from gpu_worker.weights.packed_maps import PackedMaps, cut_weight
from gpu_worker.weights.quantized_linear import can_multiply, make_quantized_linear
from gpu_worker.weights.stored.format import (
    IntegerFormat,
    Packing,
    read_stored_format,
)
from gpu_worker.weights.stored.integers import integer_tensors, unpack_integers
from gpu_worker.weights.tensor_file import Piece
from kernels.cpu.library import native
from kernels.cpu.linear import PackedLinear
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load, random_prompt

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
LATENT_SIZES = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "v_head_dim": 16,
    "moe_intermediate_size": 64,
}
AWQ = IntegerFormat(Packing.AWQ, 4, 32, zero_shift=0)
every_form = pytest.mark.parametrize("name", FORMS)


# Shares of a map.


def random_tensors(stored, num_out, num_in):
    tensors = {}
    for name, (shape, dtype) in integer_tensors(stored, num_out, num_in).items():
        if dtype == torch.int32:
            tensors[name] = torch.randint(-(2**31), 2**31, shape).to(torch.int32)
        else:
            tensors[name] = (torch.rand(shape) + 0.5).half().float()
    return tensors


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(None), slice(None)),
        (slice(3, 17), slice(None)),
        (slice(None), slice(128, 256)),
        (slice(None), slice(96, 192)),
    ],
)
def test_a_share_is_that_of_the_whole(packing, group_size, rows, columns):
    stored = IntegerFormat(packing, 4, group_size, zero_shift=0)
    whole = unpack_integers(stored, random_tensors(stored, 24, 256))
    cut = cut_weight(whole, rows, columns)
    assert cut is not None
    assert can_multiply(cut, torch.bfloat16) == (native() is not None)
    assert torch.equal(cut.dequantized(), whole.dequantized()[rows, columns])


def test_a_share_that_cuts_groups_too_small_is_dequantized():
    whole = unpack_integers(AWQ, random_tensors(AWQ, 8, 64))
    assert cut_weight(whole, slice(None), slice(16, 48)) is None


@pytest.mark.parametrize("columns", [slice(0, 16), slice(16, 48), slice(32, 64), slice(0, 64)])
@every_form
def test_maps_of_any_share_multiply_alike(name, columns):
    """The map that is read of packed tensors is that of the weight they stand for."""
    form = FORMS[name]
    tensors, stands_for = form.pack(torch.randn(24, 256))
    stored = read_stored_format(JsonFields("config", "", {"quantization_config": form.config}))

    def fill(piece, out):
        tensor = tensors[piece.name.removeprefix("map.")]
        out.copy_(tensor.view(out.shape))

    maps = PackedMaps(stored, {f"map.{end}" for end in tensors}, torch.float32, CPU, fill)
    piece = Piece("map.weight", (24, 256), (slice(8, 24), columns))
    x = torch.randn(5, columns.stop - columns.start)
    actual = maps.linear([piece, piece], None)(x)
    expected = x @ stands_for[8:24, columns].T
    torch.testing.assert_close(actual, torch.cat([expected] * 2, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group_size", [32, 128])
def test_eight_bits_in_groups_multiply_in_our_kernel(group_size):
    stored = IntegerFormat(Packing.GPTQ, 8, group_size, zero_shift=0)
    whole = unpack_integers(stored, random_tensors(stored, 40, 256))
    x = torch.randn(9, 256).bfloat16()
    expected = x.double() @ whole.dequantized().double().T
    linear = make_quantized_linear(whole, None, torch.bfloat16)
    assert isinstance(linear, PackedLinear) == (native() is not None)
    actual = linear(x).double()
    assert (actual - expected).abs().max() < 0.01 * expected.abs().max()


# Models.


def tokens(directory, dtype=torch.float32):
    sequence = Sequence(random_prompt(41, seed=1))
    PagedLoop(load(directory, dtype), 16).generate([sequence], 32)
    return sequence


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in FORMS),
        ("qwen2", "awq"),
        ("gpt_neox", "gptq"),
        ("deepseek_v3", "gptq_32"),
        ("deepseek_v3", "fp8_block"),
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "fp8_block"),
        ("glm4_moe", "gptq_32"),
    ],
)
def test_a_checkpoint_gives_the_tokens_of_what_it_stands_for(model_dirs, tmp_path, family, name):
    sizes = SIZES | LATENT_SIZES if family.startswith("deepseek") else SIZES
    if family.endswith("moe"):
        sizes |= {"moe_intermediate_size": 128, "head_dim": 32}
    directory = model_dirs.get(family, **sizes)
    packed = write(directory, tmp_path / "packed", FORMS[name])
    plain = write(directory, tmp_path / "plain", FORMS[name], packed=False)
    actual, expected = tokens(packed), tokens(plain)
    assert actual.output == expected.output
    torch.testing.assert_close(
        torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-3, atol=2e-3
    )
    original = tokens(directory).logits[0]
    assert not torch.allclose(original, actual.logits[0], atol=1e-3), "nothing was quantized"


@pytest.mark.parametrize("kept", [r".*\.layers\.0\..*", r".*(k_proj|down_proj).*"])
@every_form
def test_layers_and_parts_of_fused_maps_may_stay_as_they_are(model_dirs, tmp_path, name, kept):
    directory = model_dirs.get("llama", **SIZES)
    packed = write(directory, tmp_path / "packed", FORMS[name], kept)
    plain = write(directory, tmp_path / "plain", FORMS[name], kept, packed=False)
    names = Counter(key.split(".")[-1] for key in load_file(packed / "model.safetensors"))
    assert names["weight"] > len(("embedding", "head")) + 5, "some are kept"
    assert tokens(packed).output == tokens(plain).output


@pytest.mark.skipif(native() is None, reason="needs native code")
@pytest.mark.parametrize("name", ["awq", "gptq", "gptq_8bit"])
def test_integers_stay_integers_in_bfloat16(model_dirs, tmp_path, name):
    packed = write(model_dirs.get("llama", **SIZES), tmp_path / "packed", FORMS[name])
    model = load(packed, torch.bfloat16)
    assert not model.layers[0].qkv.panels.is_floating_point()


@pytest.fixture
def packed(model_dirs, tmp_path):
    """A Llama in GPTQ's form, to be damaged."""
    return write(model_dirs.get("llama", **SIZES), tmp_path / "packed", FORMS["gptq_32"])


def change(directory, name, tensor):
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")


DOWN = "model.layers.0.mlp.down_proj"


def test_inputs_out_of_order_are_refused(packed):
    change(packed, f"{DOWN}.g_idx", (torch.arange(256) // 32).flip(0).int())
    with pytest.raises(ModelError, match=r"down_proj\.g_idx puts input features out of order"):
        load(packed)


def test_a_bias_that_the_model_lacks_must_be_zero(packed):
    change(packed, f"{DOWN}.bias", torch.zeros(128, dtype=torch.float16))
    load(packed)
    change(packed, f"{DOWN}.bias", torch.ones(128, dtype=torch.float16))
    with pytest.raises(ModelError, match=r"down_proj\.bias is not zero"):
        load(packed)


def test_a_missing_part_is_named(packed):
    tensors = load_file(packed / "model.safetensors")
    del tensors[f"{DOWN}.scales"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"lacks model\.layers\.0\.mlp\.down_proj\.scales of Llama"
    ):
        load(packed)


def test_words_of_another_type_are_refused(packed):
    change(packed, f"{DOWN}.qweight", torch.zeros(32, 128))
    with pytest.raises(ModelError, match=r"qweight has dtype torch\.float32; .* torch\.int32"):
        load(packed)


def test_fp8_without_its_scale_is_refused(model_dirs, tmp_path):
    packed = write(model_dirs.get("llama", **SIZES), tmp_path / "packed", FORMS["fp8"])
    tensors = load_file(packed / "model.safetensors")
    del tensors[f"{DOWN}.weight_scale"]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight has dtype torch\.float8_e4m3fn; by config"):
        load(packed)


def test_scales_of_activations_are_not_needed(model_dirs, tmp_path):
    packed = write(model_dirs.get("llama", **SIZES), tmp_path / "packed", FORMS["fp8"])
    expected = tokens(packed).output
    change(packed, f"{DOWN}.input_scale", torch.tensor(2.0))
    assert tokens(packed).output == expected


def test_group_sizes_must_divide(model_dirs, tmp_path):
    packed = write(model_dirs.get("llama", **SIZES), tmp_path / "packed", FORMS["gptq_32"])
    config = json.loads((packed / "config.json").read_text())
    config["intermediate_size"] = 80
    (packed / "config.json").write_text(json.dumps(config))
    message = r"down_proj has 80 input features; quantization_config\.group_size is 32"
    with pytest.raises(ModelError, match=message):
        load(packed)


def test_models_of_transformers_are_refused(packed):
    method = json.loads((packed / "config.json").read_text())["quantization_config"]["quant_method"]
    with pytest.raises(ModelError, match=f"quant_method is '{method}'; of models that transf"):
        open_model(packed, "transformers")


GOOD = {name: form.config for name, form in FORMS.items()}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported:"),
        ("awq", {"quant_method": None}, "quant_method is None; supported: awq, gptq, fp8"),
        ("awq", {"bits": 3}, "bits is 3; supported: 4"),
        ("awq", {"zero_point": False}, "zero_point is False; supported: True"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; supported: 'gemm'"),
        ("awq", {"group_size": 48}, "group_size is 48; supported: 32, 64, 128, -1"),
        ("gptq", {"bits": 3}, "bits is 3; supported: 4, 8"),
        ("gptq", {"desc_act": True}, "desc_act is true; supported: false"),
        ("gptq", {"lm_head": True}, "lm_head is true; supported: false"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported:"),
        ("gptq", {"dynamic": {"+:x": {"bits": 8}}}, "dynamic is set"),
        ("fp8", {"fmt": "e5m2"}, "fmt is 'e5m2'; supported: 'e4m3'"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size is [128]; it must be two"),
        ("fp8_channel", {"format": "pack-quantized"}, "format is 'pack-quantized'; supported:"),
        ("fp8_channel", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
        ("fp8_channel", {"config_groups": {}}, "config_groups has 0 groups; supported: 1"),
        (
            "fp8_channel",
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"type": "int"}}}},
            "config_groups.g.weights.type is 'int'; supported: 'float'",
        ),
    ],
)
def test_unsupported_options_are_refused_by_name(model_dirs, tmp_path, name, changes, message):
    directory = shutil.copytree(model_dirs.get("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = GOOD[name] | changes
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        open_model(directory)
    prefix = f"{directory / 'config.json'}: quantization_config."
    assert str(caught.value).startswith(f"{prefix}{message}")

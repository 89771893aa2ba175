"""Weights rounded to integers: the rounding, the product, and whole models that hold them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.registry import open_model
from gpu_worker.weights.json_fields import ModelError
from gpu_worker.weights.quantized_linear import (
    Quantization,
    can_quantize,
    make_quantized_linear,
    quantize,
)
from kernels.cpu.library import native
from kernels.cpu.linear import PackedLinear
from tests.models_fixture import NATIVE_FAMILIES, make_model
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, random_prompt

INT8, INT4 = Quantization
SIZES = {"intermediate_size": 128}  # which 4 bits can divide into groups
every_quantization = pytest.mark.parametrize("quantization", Quantization)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def random_weight(num_out, num_in, dtype):
    return (torch.randn(num_out, num_in) * num_in**-0.5).to(dtype)


@every_dtype
@pytest.mark.parametrize(
    ("quantization", "num_in", "most_of_std"),
    [(INT8, 768, 0.01), (INT4, 768, 0.1), (INT4, 96, 0.1)],
)
def test_rounding_loses_little(quantization, num_in, most_of_std, dtype):
    weight = random_weight(50, num_in, dtype)
    lost = quantize(weight, quantization).dequantized() - weight.float()
    assert lost.std() < most_of_std * weight.float().std()


@every_dtype
def test_a_weight_that_is_integers_times_a_scale_is_kept_exactly(dtype):
    values = torch.randint(-127, 128, (20, 64))
    values[:, 0] = 127
    weight = (values * 2**-6).to(dtype)
    assert torch.equal(quantize(weight, INT8).dequantized(), weight.float())


@every_quantization
def test_a_row_is_rounded_alike_in_any_weight(quantization):
    weight = random_weight(600, 1024, torch.bfloat16)
    whole = quantize(weight, quantization).dequantized()
    assert torch.equal(quantize(weight[300:310], quantization).dequantized(), whole[300:310])


@every_quantization
@pytest.mark.parametrize("value", [0.0, 0.375])
def test_equal_weights_are_kept(quantization, value):
    weight = torch.full((3, 64), value)
    kept = quantize(weight, quantization).dequantized()
    torch.testing.assert_close(kept, weight, rtol=2**-11, atol=0)  # a scale is float16


def test_groups_that_are_on_a_grid_of_four_bits_are_kept():
    values = torch.randint(0, 16, (6, 3, 32)).float()
    values[..., 0], values[..., 1] = 0, 15
    scales, lows = torch.rand(6, 3, 1).half(), torch.randn(6, 3, 1).half()
    weight = (values * scales + lows).flatten(1)
    torch.testing.assert_close(quantize(weight, INT4).dequantized(), weight)


@every_quantization
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_out", [5, 40])
def test_the_map_is_that_of_the_dequantized_weight(num_out, has_bias, dtype, quantization):
    weight = quantize(random_weight(num_out, 192, dtype), quantization)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    linear = make_quantized_linear(weight, bias, dtype)
    for num_rows in (1, 2, 17, 64):
        x = torch.randn(num_rows, 200).to(dtype)[:, :192]
        expected = x.double() @ weight.dequantized().double().T
        actual = linear(x)
        assert actual.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        if bias is not None:
            expected += bias.double()
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("quantization", "num_in"), [(INT8, 64), (INT8, 1152), (INT8, 577), (INT4, 64), (INT4, 1152)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(num_in, dtype, quantization):
    weight = quantize(random_weight(160, num_in, dtype), quantization)
    linear = make_quantized_linear(weight, None, dtype)
    x = torch.randn(64, num_in).to(dtype)
    together = linear(x)
    for num_rows in (1, 2, 3, 4, 5, 8, 17, 64):
        assert torch.equal(linear(x[:num_rows]), together[:num_rows])
        assert torch.equal(linear(x[-num_rows:]), together[-num_rows:])


def load(directory, quantization, dtype=torch.float32):
    return open_model(directory, quantization=quantization).load(dtype, CPU, lambda _: None)


def dequantized_copy(directory, copy, quantization, dtype):
    """The same model with the weights that its maps have after quantization, in float32."""
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        form = INT8 if name.startswith(("lm_head", "embed_out")) else quantization
        is_kept = tensor.dim() == 1 or any(
            part in name for part in ("embed", "gate.", "router.", "_bias")
        )
        if tensor.dim() == 3:  # experts, transposed
            each = [quantize(t.t().to(dtype), form).dequantized().t() for t in tensor]
            tensors[name] = torch.stack(each)
        elif "embed_out" in name or not is_kept:
            tensors[name] = quantize(tensor.to(dtype), form).dequantized()
        else:
            tensors[name] = tensor.to(dtype).float()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@every_quantization
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_a_quantized_model_is_the_model_with_dequantized_weights(
    model_dirs, tmp_path, family, quantization
):
    directory = model_dirs.get(family, **SIZES)
    copy = dequantized_copy(
        directory, make_model(tmp_path / "copy", family, **SIZES), quantization, torch.float32
    )
    expected, actual = (Sequence(random_prompt(41, seed=1)) for _ in range(2))
    PagedLoop(load(copy, None), 16).generate([expected], 48)
    PagedLoop(load(directory, quantization), 16).generate([actual], 48)
    assert actual.output == expected.output
    torch.testing.assert_close(
        torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3
    )
    plain = Sequence(actual.prompt)
    PagedLoop(load(directory, None), 16).generate([plain], 1)
    assert not torch.allclose(plain.logits[0], actual.logits[0], atol=1e-3), "nothing was quantized"


@every_quantization
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "gpt_neox"])
def test_a_sequence_in_bfloat16_does_not_depend_on_its_company(model_dirs, family, quantization):
    model = load(model_dirs.get(family, **SIZES), quantization, torch.bfloat16)
    prompts = [random_prompt(length, seed=length) for length in (1, 15, 50)]
    together = [Sequence(prompt, start_step=2 * i) for i, prompt in enumerate(prompts)]
    PagedLoop(model, 8).generate(together, 16)
    for sequence in together:
        alone = Sequence(sequence.prompt)
        PagedLoop(model, 8).generate([alone], 16, chunk_len=5)
        assert alone.output == sequence.output
        assert torch.equal(torch.stack(alone.logits), torch.stack(sequence.logits))


def test_a_tied_head_is_quantized_and_the_embedding_is_not(model_dirs):
    model = load(model_dirs.get("llama", tie_word_embeddings=True, **SIZES), INT8, torch.bfloat16)
    assert model.embedding.dtype == torch.bfloat16
    hidden = torch.randn(3, 64).bfloat16()
    head = quantize(model.embedding, INT8).dequantized()
    torch.testing.assert_close(model.logits(hidden), hidden.float() @ head.T, rtol=2e-2, atol=5e-2)


def test_four_bits_need_whole_groups(model_dirs):
    assert can_quantize(112, INT8)
    assert not can_quantize(112, INT4)
    message = (
        r"quantization is int4; model\.layers\.0\.mlp\.down_proj has 112 input features, "
        r"which must be a multiple of 32"
    )
    with pytest.raises(ModelError, match=message):
        load(model_dirs.get("llama"), INT4)
    load(model_dirs.get("llama"), INT8)


def test_another_device_is_refused(model_dirs):
    source = open_model(model_dirs.get("llama"), quantization=INT8)
    with pytest.raises(
        ModelError, match=r"quantization is int8, .* cpu and cuda; the device is xpu:1"
    ):
        source.load(torch.float32, torch.device("xpu:1"), lambda _: None)


def test_models_of_transformers_are_refused(model_dirs):
    for family, model_class in (("gpt2", ""), ("llama", "transformers")):
        with pytest.raises(ModelError, match=r"quantization is int4, .* run by transformers"):
            open_model(model_dirs.get(family), model_class, INT4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_own_kernel_is_used_where_it_can_be(dtype):
    weight = quantize(random_weight(40, 64, dtype), INT4)
    is_ours = isinstance(make_quantized_linear(weight, None, dtype), PackedLinear)
    assert is_ours == (native() is not None and dtype is not torch.float16)

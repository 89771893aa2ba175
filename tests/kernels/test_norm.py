import pytest
import torch

from kernels import reference
from kernels.triton.norm import add_rms_norm, rms_norm
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import assert_close, every_dtype

EPS = 1e-5

wide_weights = pytest.mark.parametrize("is_wide", [False, True], ids=["", "fp32 weight"])


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (5, 768), (4, 3, 24)])
@wide_weights
def test_rms_norm_is_the_twin_s(shape, dtype, is_wide, device):
    x = strided(shape, dtype, device)
    weight = torch.randn(shape[-1], device=device).to(torch.float32 if is_wide else dtype)
    assert_close(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (5, 768)])
@wide_weights
def test_add_rms_norm_is_the_twin_s_and_keeps_its_inputs(shape, dtype, is_wide, device):
    x, residual = strided(shape, dtype, device), strided(shape, dtype, device)
    weight = torch.randn(shape[-1], device=device).to(torch.float32 if is_wide else dtype)
    kept = x.clone(), residual.clone()
    out, total = add_rms_norm(x, residual, weight, EPS)
    twin_out, twin_total = reference.add_rms_norm(x, residual, weight, EPS)
    assert_close(total, twin_total)
    assert_close(out, twin_out)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_a_row_of_zeros_stays_zero(device):
    zeros, ones = torch.zeros(2, 16, device=device), torch.ones(16, device=device)
    assert torch.equal(rms_norm(zeros, ones, EPS), zeros)


@every_dtype
def test_the_twin_is_transformers_to_the_bit(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs = llama.LlamaRMSNorm(96, eps=EPS).to(dtype)
    theirs.weight.data.normal_()
    x = torch.randn(7, 96).to(dtype)
    assert torch.equal(reference.rms_norm(x, theirs.weight.data, EPS), theirs(x))


@every_dtype
def test_the_twin_with_an_fp32_weight_is_gemma_s_norm_to_the_bit(dtype):
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    theirs = gemma.Gemma3RMSNorm(96, eps=EPS).to(dtype)
    theirs.weight.data.normal_()
    x = torch.randn(7, 96).to(dtype)
    assert torch.equal(reference.rms_norm(x, 1 + theirs.weight.data.float(), EPS), theirs(x))


def test_norms_reach_past_int32_offsets(device):
    x = far_apart((3, 40), torch.float16, device)
    weight = torch.randn(40, dtype=torch.float16, device=device)
    assert_close(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    for ours, twin in zip(
        add_rms_norm(x, x, weight, EPS), reference.add_rms_norm(x, x, weight, EPS), strict=True
    ):
        assert_close(ours, twin)


def test_norms_name_the_tensor_that_does_not_fit(device):
    x, weight = torch.randn(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); it must be \(8,\)"):
        rms_norm(x, weight[:7], EPS)
    with pytest.raises(ValueError, match=r"residual has dtype torch\.float16"):
        add_rms_norm(x, x.half(), weight, EPS)
    with pytest.raises(ValueError, match=r"x has dtype torch\.int64"):
        rms_norm(x.long(), weight, EPS)

"""Linear maps in packed form."""

import pytest
import torch
from torch.nn import functional

from gpu_worker.weights.linear import make_linear
from kernels.cpu.library import native
from kernels.cpu.linear import PackedLinear

ROW_COUNTS = [1, 2, 3, 8, 17, 64]


@pytest.mark.parametrize("num_features", [24, 768, 2048])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)],
)
def test_it_is_a_matrix_product(dtype, tolerance, has_bias, num_features):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, num_features, generator=generator).to(dtype) / num_features**0.5
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    linear = make_linear(weight, bias)
    for num_rows in ROW_COUNTS:
        wide = torch.randn(num_rows, 2 * num_features, generator=generator).to(dtype)
        for x in (wide[:, :num_features], wide[:, :num_features].contiguous()):
            expected = functional.linear(
                x.double(), weight.double(), None if bias is None else bias.double()
            )
            actual = linear(x)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_features", [64, 1023, 1024, 1536, 4096])
def test_a_row_has_the_same_bits_in_any_company(num_features, dtype):
    generator = torch.Generator().manual_seed(0)
    linear = make_linear(torch.randn(256, num_features, generator=generator).to(dtype), None)
    assert isinstance(linear, PackedLinear) == (native() is not None)
    x = torch.randn(64, num_features, generator=generator).to(dtype)
    together = linear(x)
    for num_rows in ROW_COUNTS:
        assert torch.equal(linear(x[:num_rows]), together[:num_rows])
        assert torch.equal(linear(x[-num_rows:]), together[-num_rows:])

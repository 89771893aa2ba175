"""Linear maps of heads in C, against the definition and against one map each."""

import ctypes

import pytest
import torch

from kernels.cpu.library import native
from kernels.cpu.linear import pack, pack_heads
from tests.kernels.tolerance import assert_close

pytestmark = pytest.mark.skipif(native() is None, reason="needs native code")
native_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = [(1, 16, 64), (3, 24, 20), (16, 128, 512), (5, 512, 70), (3, 33, 40)]  # H, K, N


@native_dtypes
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 130])
@pytest.mark.parametrize(("num_heads", "num_in", "num_out"), SHAPES)
def test_each_head_has_the_bits_of_its_own_map(num_heads, num_in, num_out, num_tokens, dtype):
    weight = (torch.randn(num_heads, num_out, num_in) / num_in**0.5).to(dtype)
    # Cut out of wider rows, as a model's queries are, and written between other numbers.
    x = torch.randn(num_tokens, num_heads, num_in + 6).to(dtype)[..., 4:-2]
    wide = torch.full((num_tokens, num_heads, num_out + 5), 7.0, dtype=dtype)
    out = wide[..., :num_out]
    pack_heads(weight)(x, out)
    assert_close(out, torch.einsum("thk,hnk->thn", x.double(), weight.double()).to(dtype))
    assert (wide[..., num_out:] == 7).all()
    for head in range(num_heads):
        assert torch.equal(out[:, head], pack(weight[head], None)(x[:, head]))


@pytest.mark.parametrize("num_shares", [1, 2, 5, 64, 256])
def test_any_number_of_shares_does_all_of_it(num_shares):
    heads = pack_heads(torch.randn(5, 70, 24))
    x, out, expected = torch.randn(9, 5, 24), torch.empty(9, 5, 70), torch.empty(9, 5, 70)
    heads(x, expected)
    out.fill_(float("nan"))
    kernel, first = native().linear_heads, heads._first
    fields = first.call(x, out, 9).fields
    packed = kernel.pack(5, 24, 70, first.panels.nbytes // 5, *fields)
    share = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    for index in reversed(range(num_shares)):
        share(kernel.share_address)(packed, index, num_shares)
    assert torch.equal(out, expected)


def test_heads_name_what_does_not_fit():
    heads = pack_heads(torch.randn(2, 8, 16))
    with pytest.raises(ValueError, match=r"x has shape \(3, 1, 16\); it must be \(3, 2, 16\)"):
        heads(torch.zeros(3, 1, 16), torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match=r"out has shape \(3, 2, 9\); it must be \(3, 2, 8\)"):
        heads(torch.zeros(3, 2, 16), torch.zeros(3, 2, 9))

import pytest
import torch
from torch.nn.functional import linear

from kernels.cpu.library import native
from kernels.cpu.linear import can_pack, pack
from tests.kernels.tolerance import assert_close

needs_bf16_dot = pytest.mark.skipif(
    (library := native()) is None or not library.has_linear,
    reason="this CPU has no dot product of bfloat16",
)


@needs_bf16_dot
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(2, 1), (64, 70), (768, 96), (2048, 32)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 12, 13, 31, 100, 193])
def test_a_packed_linear_is_torch_s(num_rows, num_in, num_out, has_bias):
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).bfloat16()
    bias = torch.randn(num_out).bfloat16() if has_bias else None
    x = torch.randn(num_rows, num_in + 6).bfloat16()[:, :num_in]
    assert_close(pack(weight, bias)(x), linear(x, weight, bias))


@needs_bf16_dot
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_row_depends_on_no_other_row(num_threads):
    apply = pack(torch.randn(160, 2048).bfloat16(), None)
    x = torch.randn(150, 2048).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = apply(x)
    finally:
        torch.set_num_threads(before)
    for row in range(150):
        assert torch.equal(apply(x[row : row + 1])[0], together[row])


@needs_bf16_dot
@pytest.mark.parametrize("num_rows", [1, 40])
def test_as_float32_it_gives_the_same_numbers(num_rows):
    apply = pack(torch.randn(70, 64).bfloat16(), torch.randn(70).bfloat16())
    x = torch.randn(num_rows, 64).bfloat16()
    assert torch.equal(apply(x, torch.float32), apply(x).float())


@needs_bf16_dot
def test_it_names_what_does_not_fit():
    apply = pack(torch.randn(8, 4).bfloat16(), None)
    with pytest.raises(ValueError, match=r"x has shape \(3, 5\), required is \(3, 4\)"):
        apply(torch.randn(3, 5).bfloat16())
    with pytest.raises(ValueError, match=r"x has dtype torch\.float32"):
        apply(torch.randn(3, 4))


def test_other_weights_are_left_to_others():
    assert not can_pack(torch.randn(8, 4))
    assert not can_pack(torch.randn(8, 3).bfloat16())
    assert not can_pack(torch.randn(8, 4, device="meta").bfloat16())


@needs_bf16_dot
@pytest.mark.parametrize("has_amx", [False, True])
def test_maps_are_packed_with_and_without_amx(monkeypatch, has_amx):
    # oneDNN's products with AMX round a row by how many rows there are, so ours serve there, too.
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_amx})
    assert can_pack(torch.randn(64, 32).bfloat16())

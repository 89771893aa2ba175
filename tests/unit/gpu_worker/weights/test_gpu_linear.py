"""Quantized maps as a GPU computes them, by the kernel's twin and a stand-in for `_scaled_mm`."""

import pytest
import torch

from bench.quantize import FORMS, write
from gpu_worker.models.registry import open_model
from gpu_worker.weights import gpu_linear
from gpu_worker.weights.gpu_linear import QuantizedLinear, ScaledLinear
from gpu_worker.weights.json_fields import JsonFields
from gpu_worker.weights.packed_maps import PackedMaps
from gpu_worker.weights.quantized_linear import Quantization, make_quantized_linear, quantize
from gpu_worker.weights.stored.format import read_stored_format
from gpu_worker.weights.tensor_file import Piece
from kernels import ops, reference
from kernels.cpu import linear as native
from tests.unit.gpu_worker.models.paged_loop import CPU, load

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("gpu")


def scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype):
    """`torch._scaled_mm` with a scale for each row, as on a GPU: what it takes, and what it gives.

    From torch 2.11's `aten/src/ATen/native/cuda/ScaledBlas.cpp`.
    """
    assert a.dtype is E4M3
    assert b.dtype is E4M3
    assert a.stride() == (a.shape[1], 1), "the first is row-major"
    assert b.stride() == (1, b.shape[0]), "the second is column-major"
    assert a.shape[1] % 16 == 0
    assert b.shape[0] % 16 == 0
    assert b.shape[1] % 16 == 0
    assert scale_a.shape == (a.shape[0], 1)
    assert scale_b.shape == (1, b.shape[1])
    for scale in (scale_a, scale_b):
        assert scale.dtype is torch.float32
        assert scale.is_contiguous()
    assert out_dtype is torch.bfloat16
    assert bias is None or (bias.dtype, bias.shape) == (torch.bfloat16, (b.shape[1],))
    out = (a.float() @ b.float()) * scale_a * scale_b
    return (out if bias is None else out + bias.float()).to(out_dtype)


@pytest.fixture
def gpu(monkeypatch):
    """The CPU is taken for a GPU; returns how to set its capability."""

    def be(capability):
        monkeypatch.setattr(gpu_linear, "_capability", lambda _: capability)

    monkeypatch.setattr(gpu_linear, "is_here", lambda _: True)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    be((9, 0))
    return be


def make_maps(name, weight):
    """Maps whose `map.weight` is stored in a form; and the weight that its bits stand for."""
    form = FORMS[name]
    tensors, stands_for = form.pack(weight)
    stored = read_stored_format(JsonFields("config", "", {"quantization_config": form.config}))

    def fill(piece, out):
        out.copy_(tensors[piece.name.removeprefix("map.")].view(out.shape))

    names = {f"map.{end}" for end in tensors}
    return (lambda dtype: PackedMaps(stored, names, dtype, CPU, fill)), stands_for


def assert_near(actual, expected, share):
    """Within a share of the largest number."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).abs().max() < share * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [slice(0, 256), slice(64, 192), slice(16, 48)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_checkpoint_s_map_stays_packed(name, columns, dtype):
    maps_of, stands_for = make_maps(name, torch.randn(48, 256))
    maps = maps_of(dtype)
    piece = Piece("map.weight", (48, 256), (slice(16, 48), columns))
    bias = torch.randn(64).to(dtype)
    linear = maps.linear([piece, piece], bias)
    x = torch.randn(5, columns.stop - columns.start).to(dtype)
    weight = torch.cat([stands_for[16:48, columns]] * 2)
    expected = x.double() @ weight.double().T + bias.double()
    is_row_wise = name in ("fp8", "fp8_channel") and dtype is torch.bfloat16
    cuts_groups = columns.start == 16 and name not in ("fp8", "fp8_channel")
    if not cuts_groups:
        assert isinstance(linear, ScaledLinear if is_row_wise else QuantizedLinear)
    assert_near(linear(x), expected, 0.05 if is_row_wise else 0.01)


@pytest.mark.parametrize(
    ("capability", "dtype", "num_out"),
    [((8, 0), torch.bfloat16, 48), ((9, 0), torch.float16, 48), ((9, 0), torch.bfloat16, 40)],
)
def test_fp8_numbers_that_torch_does_not_multiply_are_dequantized_in_the_product(
    gpu, capability, dtype, num_out
):
    gpu(capability)
    maps_of, stands_for = make_maps("fp8_channel", torch.randn(num_out, 64))
    linear = maps_of(dtype).linear([Piece("map.weight", (num_out, 64))], None)
    assert isinstance(linear, QuantizedLinear)
    assert linear.values.dtype is E4M3
    x = torch.randn(3, 64).to(dtype)
    assert_near(linear(x), x.double() @ stands_for.double().T, 0.01)


def test_fp8_in_float32_is_dequantized():
    maps_of, stands_for = make_maps("fp8", torch.randn(48, 64))
    linear = maps_of(torch.float32).linear([Piece("map.weight", (48, 64))], None)
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear(x), x @ stands_for.T, rtol=1e-4, atol=1e-4)


def test_rows_of_zeros_and_of_numbers_that_are_not_finite():
    weight = torch.randn(32, 64).to(E4M3)
    linear = gpu_linear.pack_fp8(weight, torch.ones(32, 1), None, torch.bfloat16)
    columns = torch.randn(64, 4).bfloat16()
    assert torch.equal(linear(columns.t()), linear(columns.t().contiguous()))
    x = torch.randn(4, 64).bfloat16()
    x[1], x[2, 5], x[3, 5] = 0, torch.nan, torch.inf
    out = linear(x)
    assert out[0].isfinite().all()
    assert not out[1].any()
    assert not out[2:].isfinite().any()
    assert linear(x[:0]).shape == (0, 32)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("quantization", Quantization)
def test_weights_rounded_at_loading_stay_integers(quantization, has_bias):
    weight = quantize(torch.randn(40, 96).bfloat16(), quantization)
    bias = torch.randn(40).bfloat16() if has_bias else None
    linear = make_quantized_linear(weight, bias, torch.bfloat16)
    assert isinstance(linear, QuantizedLinear)
    x = torch.randn(5, 96).bfloat16()
    expected = x.double() @ weight.dequantized().double().T + (0 if bias is None else bias.double())
    assert_near(linear(x), expected, 0.01)


@pytest.mark.parametrize("name", FORMS)
def test_a_model_s_maps_stay_packed(model_dirs, tmp_path, name):
    packed = write(model_dirs.get("llama", **SIZES), tmp_path / "packed", FORMS[name])
    layer = load(packed, torch.bfloat16).layers[0]
    linears = layer.qkv, layer.attention_output
    assert all(isinstance(each, QuantizedLinear | ScaledLinear) for each in linears)


@pytest.mark.parametrize("name", ["fp8", "awq", None])
def test_maps_of_a_batch_invariant_model_have_one_order_of_sums(
    model_dirs, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(native, "native", lambda: None)  # else C multiplies what is not quantized
    calls = []
    for op in ("linear", "quantized_linear"):
        twin = getattr(reference, op)
        monkeypatch.setattr(
            ops, op, lambda *args, twin=twin, **options: calls.append(options) or twin(*args)
        )
    directory = model_dirs.get("llama", **SIZES)
    if name is not None:
        directory = write(directory, tmp_path / "packed", FORMS[name])
    source = open_model(directory, is_batch_invariant=True)
    model = source.load(torch.bfloat16, CPU, lambda _: None)
    calls.clear()  # kernels are compiled while the model is loaded
    layer = model.layers[0]
    mlp = layer.feed_forward
    x = torch.randn(3, 128).bfloat16()
    for linear in (layer.qkv, layer.attention_output, mlp.gate_up, model.lm_head):
        assert len(linear(x)) == 3
    assert len(mlp.down(torch.randn(3, 256).bfloat16())) == 3
    assert len(calls) == 5
    packed = [{"has_one_tile": True}] * 4 if name else [{}] * 4
    assert sorted(calls, key=len) == sorted([*packed, {}], key=len)

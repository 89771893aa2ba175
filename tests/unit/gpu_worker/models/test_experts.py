"""Grouped experts, as on a GPU, give the results of experts that run one by one."""

from dataclasses import replace

import pytest
import torch

from gpu_worker.models.experts.config import ExpertsConfig
from gpu_worker.models.experts.mixture import Experts, GroupedExperts, make_experts
from gpu_worker.models.experts.routing import Router
from gpu_worker.models.feed_forward import GatedMlp
from gpu_worker.weights import gpu_linear
from gpu_worker.weights.gpu_linear import QuantizedLinear, ScaledLinear
from gpu_worker.weights.linear import PlainLinear
from gpu_worker.weights.quantized_linear import Quantization, make_quantized_linear, quantize
from gpu_worker.weights.stored.fp8 import Fp8Weight
from gpu_worker.weights.stored.mxfp4 import Mxfp4Weight, pack_mxfp4

HIDDEN, SIZE, NUM_EXPERTS = 24, 20, 5
CONFIG = ExpertsConfig(
    layers=(True,),
    num_experts=NUM_EXPERTS,
    num_per_token=2,
    intermediate_size=SIZE,
    has_shares_of_one=True,
)


def plain(num_out, num_in, *, has_bias=False):
    bias = torch.randn(num_out) if has_bias else None
    return PlainLinear(torch.randn(num_out, num_in) * num_in**-0.5, bias)


def make_parts(*, has_bias=False):
    torch.manual_seed(0)
    route = Router(CONFIG, plain(NUM_EXPERTS, HIDDEN))
    experts = [
        GatedMlp(plain(2 * SIZE, HIDDEN), plain(HIDDEN, SIZE, has_bias=has_bias))
        for _ in range(NUM_EXPERTS)
    ]
    return route, experts, route.scores.weight[:1]


def quantized(kind, weight):
    """A map as the loader makes it on a GPU, and the same map dequantized."""
    if kind == "fp8":
        fp8 = Fp8Weight(weight.to(torch.float8_e4m3fn), torch.rand(len(weight), 1) + 0.5)
        linear = ScaledLinear(fp8.values, fp8.scales.t().contiguous(), None)
        return linear, PlainLinear(fp8.dequantized().half(), None)
    if kind == "mxfp4":
        num_out, num_in = weight.shape
        blocks = torch.randint(256, (num_out, num_in // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, blocks.shape[:2], dtype=torch.uint8)
        mxfp4, bias = Mxfp4Weight(blocks, scales), torch.randn(num_out).half()
        linear = pack_mxfp4(mxfp4, bias, torch.float16)
        return linear, PlainLinear(mxfp4.dequantized().half(), bias)
    integers = quantize(weight, Quantization(kind.split()[0]))
    if kind == "int8 with some offsets" and torch.rand(()) < 0.5:
        integers = replace(integers, offsets=torch.rand(len(weight), 1).half().float())
    linear = make_quantized_linear(integers, None, torch.float16)
    assert isinstance(linear, QuantizedLinear)
    return linear, PlainLinear(integers.dequantized().half(), None)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_grouped_experts_equal_experts_one_by_one(monkeypatch, num_tokens, has_bias):
    parts = make_parts(has_bias=has_bias)
    one_by_one = make_experts(*parts)
    monkeypatch.setattr(gpu_linear, "is_here", lambda _: True)
    grouped = make_experts(*parts)
    assert isinstance(one_by_one, Experts)
    assert isinstance(grouped, GroupedExperts)
    x = torch.randn(num_tokens, HIDDEN)
    torch.testing.assert_close(grouped(x), one_by_one(x))
    torch.testing.assert_close(grouped(x)[:1], grouped(x[:1]), msg="a row depends on no other")


@pytest.mark.parametrize("kind", ["int8", "int8 with some offsets", "int4", "fp8", "mxfp4"])
def test_quantized_experts_are_grouped(monkeypatch, kind):
    monkeypatch.setattr(gpu_linear, "is_here", lambda _: True)
    monkeypatch.setattr(QuantizedLinear, "compile", lambda *_: None)
    torch.manual_seed(0)
    router = torch.randn(NUM_EXPERTS, 64)
    route = Router(CONFIG, PlainLinear(router, None))
    maps = [
        (*quantized(kind, torch.randn(64, 64) / 8), *quantized(kind, torch.randn(64, 32) / 8))
        for _ in range(NUM_EXPERTS)
    ]
    grouped = make_experts(
        route, [GatedMlp(gate_up, down) for gate_up, _, down, _ in maps], router[:1].half()
    )
    assert isinstance(grouped, GroupedExperts)
    one_by_one = Experts(route, tuple(GatedMlp(gate_up, down) for _, gate_up, _, down in maps))
    x = torch.randn(7, 64).half()
    torch.testing.assert_close(grouped(x), one_by_one(x), rtol=1e-2, atol=1e-2)


def test_experts_with_other_maps_run_one_by_one(monkeypatch):
    monkeypatch.setattr(gpu_linear, "is_here", lambda _: True)
    monkeypatch.setattr(QuantizedLinear, "compile", lambda *_: None)
    route, experts, row = make_parts()
    biased = GatedMlp(experts[0].gate_up, plain(HIDDEN, SIZE, has_bias=True))
    assert isinstance(make_experts(route, [*experts[1:], biased], row), Experts)
    other = GatedMlp(experts[0].gate_up, lambda x: x)
    assert isinstance(make_experts(route, [*experts[1:], other], row), Experts)
    gate_up, _ = quantized("int8", torch.randn(2 * SIZE, HIDDEN))
    assert isinstance(
        make_experts(route, [*experts[1:], GatedMlp(gate_up, experts[0].down)], row), Experts
    )
    packed = [
        GatedMlp(quantized(kind, torch.randn(64, 64))[0], experts[0].down)
        for kind in ("int8", "int4", "int8", "int8", "int8")
    ]
    assert isinstance(make_experts(route, packed, row), Experts)

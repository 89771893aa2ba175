"""Grouped experts, as on a GPU, give the results of experts that run one by one."""

import pytest
import torch

from gpu_worker.models.decoder_layer import (
    Experts,
    GatedMlp,
    GroupedExperts,
    LikeliestExperts,
    make_experts,
)
from gpu_worker.weights import gpu_linear
from gpu_worker.weights.linear import PlainLinear

HIDDEN, SIZE, NUM_EXPERTS = 24, 20, 5


def plain(num_out, num_in, *, has_bias=False):
    bias = torch.randn(num_out) if has_bias else None
    return PlainLinear(torch.randn(num_out, num_in) * num_in**-0.5, bias)


def make_parts(*, has_bias=False):
    torch.manual_seed(0)
    route = LikeliestExperts(plain(NUM_EXPERTS, HIDDEN), 2)
    experts = [
        GatedMlp(plain(2 * SIZE, HIDDEN), plain(HIDDEN, SIZE, has_bias=has_bias))
        for _ in range(NUM_EXPERTS)
    ]
    return route, experts


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_grouped_experts_equal_experts_one_by_one(monkeypatch, num_tokens):
    route, experts = make_parts()
    one_by_one = make_experts(route, experts)
    monkeypatch.setattr(gpu_linear, "is_here", lambda _: True)
    grouped = make_experts(route, experts)
    assert isinstance(one_by_one, Experts)
    assert isinstance(grouped, GroupedExperts)
    x = torch.randn(num_tokens, HIDDEN)
    torch.testing.assert_close(grouped(x), one_by_one(x))
    torch.testing.assert_close(grouped(x)[:1], grouped(x[:1]), msg="a row depends on no other")


def test_experts_with_other_maps_run_one_by_one(monkeypatch):
    monkeypatch.setattr(gpu_linear, "is_here", lambda _: True)
    assert isinstance(make_experts(*make_parts(has_bias=True)), Experts)
    route, experts = make_parts()
    quantized = GatedMlp(experts[0].gate_up, lambda x: x)
    assert isinstance(make_experts(route, [*experts[1:], quantized]), Experts)

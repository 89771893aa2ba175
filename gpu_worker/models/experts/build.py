"""Builds a layer's mixture of experts from a checkpoint."""

import torch

from gpu_worker.models.experts.config import ExpertsConfig, Routing
from gpu_worker.models.experts.mixture import ExpertsAndShared, make_experts
from gpu_worker.models.experts.routing import Router, read_router
from gpu_worker.models.feed_forward import FeedForward, build_gated_mlp
from gpu_worker.weights.linear import make_linear
from gpu_worker.weights.reader import Weights


def build_experts(config: ExpertsConfig, hidden: int, layer: str, weights: Weights) -> FeedForward:
    """Build this rank's part of a layer's experts; the caller sums the ranks' results.

    Args:
        config: The experts.
        hidden: Hidden size.
        layer: The layer's name in the checkpoint.
        weights: The checkpoint.
    """
    names, module = config.names, f"{layer}.{config.names.module}"
    router = read_router(f"{module}.gate", config.num_experts, hidden, weights)
    bias = None
    if config.routing is Routing.SIGMOID:
        name = f"{module}.gate.e_score_correction_bias"
        bias = weights.tensor(name, config.num_experts, dtype=torch.float32)
    size = config.intermediate_size
    routed = make_experts(
        Router(config, make_linear(router, None), bias),
        tuple(
            build_gated_mlp(hidden, size, f"{module}.experts.{index}", weights, names.maps)
            for index in range(config.num_experts)
        ),
        router[:1].to(weights.dtype),
    )
    if config.shared_size is None:
        return routed
    shared = f"{module}.{names.shared}"
    gate = None
    if config.has_shared_gate:
        gate = make_linear(weights.tensor(f"{shared}_gate.weight", 1, hidden), None)
    return ExpertsAndShared(
        routed, build_gated_mlp(hidden, config.shared_size, shared, weights), gate
    )

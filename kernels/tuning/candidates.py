"""Launches one configuration of attention on one workload, and times it."""

from collections.abc import Callable, Sequence

import torch

from kernels.triton.attention.decode import paged_attention_decode
from kernels.triton.attention.prefill import paged_attention_prefill
from kernels.triton.configs import DecodeConfig, PrefillConfig, forced
from kernels.tuning.timing import seconds_of
from kernels.tuning.workload import ModelSizes, paged_inputs, queries


def decode_seconds(
    model: ModelSizes,
    config: DecodeConfig,
    seq_lens: Sequence[int],
    device: torch.device,
    repeats: int,
) -> float:
    """Return the seconds of one launch of decode attention, for sequences of these lengths."""
    with forced(config):
        return seconds_of(decode_launch(model, seq_lens, device), device, repeats)


def prefill_seconds(
    model: ModelSizes,
    config: PrefillConfig,
    chunks: Sequence[tuple[int, int]],
    device: torch.device,
    repeats: int,
) -> float:
    """Return the seconds of one launch of prefill attention, for chunks (query_len, seq_len)."""
    with forced(config):
        return seconds_of(prefill_launch(model, chunks, device), device, repeats)


def decode_launch(
    model: ModelSizes, seq_lens: Sequence[int], device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a function that launches decode attention once, for sequences of these lengths."""
    torch.manual_seed(0)
    paged = paged_inputs(model, seq_lens, device)
    query = queries(model, len(seq_lens), device)
    scale = model.head_dim**-0.5
    return lambda: paged_attention_decode(
        query,
        *paged.args,
        scale,
        key_scales=paged.key_scales,
        value_scales=paged.value_scales,
    )


def prefill_launch(
    model: ModelSizes, chunks: Sequence[tuple[int, int]], device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a function that launches prefill attention once, for chunks (query_len, seq_len)."""
    torch.manual_seed(0)
    query_lens, seq_lens = zip(*chunks, strict=True)
    paged = paged_inputs(model, seq_lens, device)
    query = queries(model, sum(query_lens), device)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)
    scale = model.head_dim**-0.5
    return lambda: paged_attention_prefill(
        query,
        *paged.args,
        starts,
        max(query_lens),
        scale,
        key_scales=paged.key_scales,
        value_scales=paged.value_scales,
    )

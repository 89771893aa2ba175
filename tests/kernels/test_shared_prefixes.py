"""Decodes that attend to a shared prefix together have the same results as each alone."""

from dataclasses import replace

import pytest
import torch

from gpu_worker.step import shared_prefixes
from kernels import reference
from kernels.sequences import MAX_SHARED, Sequences, SharedPrefixes
from kernels.triton.attention import prefill
from kernels.triton.attention.decode import prepare_decode
from tests.kernels.tensors import make_paged, make_quantized, strided
from tests.kernels.tolerance import assert_close


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 64)
    monkeypatch.setattr(prefill, "_LEAST_POSITIONS", 64)
    monkeypatch.setattr(prefill, "num_processors", lambda _: 8)


def share(paged, members, num_blocks):
    """Let sequences begin with the blocks of the first one."""
    paged.block_tables[members, :num_blocks] = paged.block_tables[members[0], :num_blocks]


def found_in(paged):
    found = shared_prefixes.find_shared(
        paged.block_tables.cpu().numpy(), paged.seq_lens.cpu().numpy(), paged.key_cache.shape[1]
    )
    return SharedPrefixes(*(torch.from_numpy(each).to(paged.seq_lens.device) for each in found))


def attend(query, paged, shared, **options):
    out = query.new_full((len(query), query.shape[1], paged.value_cache.shape[3]), torch.nan)
    caches = paged.key_cache, paged.value_cache
    launch = prepare_decode(query, *caches, 0.3, out=out, **options, **paged.scales)
    launch(Sequences(paged.block_tables, paged.seq_lens, shared=shared))
    return out


@pytest.mark.parametrize("kind", ["plain", "int8", "latent"])
def test_the_result_is_the_twin_s(kind, device):
    """Two groups of different lengths, not of neighbours; a single sequence; padding."""
    seq_lens = [200, 77, 0, 130, 260, 81, 9, 210]
    shape = seq_lens, 1 if kind == "latent" else 2, 24, 8
    if kind == "int8":
        paged = make_quantized(*shape, torch.int8, device)
    else:
        paged = make_paged(*shape, torch.float32, device)
    if kind == "latent":
        paged = paged.latent(16)
    share(paged, [0, 4, 7], 23)
    share(paged, [1, 5], 9)
    shared = found_in(paged)
    assert shared.len_of_seq.tolist() == [184, 72, 0, 0, 184, 72, 0, 184]
    query = strided((len(seq_lens), 6, 24), torch.float32, device)
    sinks = torch.randn(6, device=device)
    for options in ({}, {"softcap": 1.5, "sinks": sinks}):
        args = query, *paged.args, 0.3
        expected = reference.paged_attention_decode(*args, **options, **paged.scales)
        assert_close(attend(query, paged, shared, **options), expected)


def test_the_shared_blocks_are_read_once_in_the_table_of_the_first(device):
    paged = make_paged([130, 140, 150], 2, 16, 8, torch.float32, device)
    share(paged, [0, 1, 2], 12)
    query, shared = torch.randn(3, 4, 16, device=device), found_in(paged)
    expected = reference.paged_attention_decode(query, *paged.args, 0.3)
    paged.block_tables[1:, :12] = 2**31 - 1
    assert_close(attend(query, paged, shared), expected)


def test_a_window_is_attended_to_alone(device):
    paged = make_paged([130, 140], 2, 16, 8, torch.float32, device)
    share(paged, [0, 1], 12)
    query, shared = torch.randn(2, 4, 16, device=device), found_in(paged)
    expected = reference.paged_attention_decode(query, *paged.args, 0.3, window=50)
    paged.block_tables[:, : (130 - 50) // 8] = 2**31 - 1
    assert_close(attend(query, paged, shared, window=50), expected)


def test_without_groups_nothing_changes(device):
    paged = make_paged([130, 0, 300], 2, 16, 8, torch.float32, device)
    query, shared = torch.randn(3, 4, 16, device=device), found_in(paged)
    assert shared.lens.tolist() == [0] * MAX_SHARED
    assert torch.equal(attend(query, paged, shared), attend(query, replace(paged), None))

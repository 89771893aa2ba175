"""Attention in which no bit of a row depends on other rows, by Triton's kernels."""

import pytest
import torch

from kernels import ops
from kernels.batch_invariant import BatchInvariantAttention
from kernels.sequences import Sequences
from kernels.triton.attention import prefill
from tests.kernels.tensors import make_paged, make_quantized
from tests.kernels.tolerance import assert_close

SCALE = 0.3
KERNEL = prefill._attend_chunks_kernel


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Attention goes to the launcher, on a device that few tiles do not fill; what it launches."""
    launches = []

    class Recorded(prefill.Launch):
        def __init__(self, kernel, fixed, options):
            launches.append((kernel, options))
            super().__init__(kernel, fixed, options)

    monkeypatch.setattr(prefill, "Launch", Recorded)
    monkeypatch.setattr(prefill, "_LEAST_POSITIONS", 64)
    monkeypatch.setattr(prefill, "num_processors", lambda _: 132)
    monkeypatch.setattr(ops, "prepare_prefill", prefill.prepare_prefill)
    return launches


def attend(attention, query, paged, decodes, chunks, options):
    """Attend as a step does to decodes, each a sequence, and chunks: (sequence, begin, end)."""
    out = torch.full_like(query, torch.nan)
    device = query.device
    caches = paged.key_cache, paged.value_cache
    attend_chunks = attention.prepare_prefill(query, *caches, SCALE, out=out, **options)
    attend_decodes = attention.prepare_decode(query, *caches, SCALE, out=out, **options)

    def sequences(numbers, lens, *rest):
        lens = torch.tensor(lens, dtype=torch.int32, device=device)
        return Sequences(paged.block_tables[numbers], lens, *rest)

    if chunks:
        query_lens = [end - begin for _, begin, end in chunks]
        starts = torch.tensor([len(decodes), *query_lens], device=device).cumsum(0)
        numbers, ends = [seq for seq, *_ in chunks], [end for *_, end in chunks]
        attend_chunks(sequences(numbers, ends, starts.to(torch.int32), max(query_lens)))
    if decodes:
        attend_decodes(sequences(decodes, paged.seq_lens[decodes].tolist()))
    return out


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(make_paged, torch.float32), (make_quantized, torch.int8)],
    ids=["float32", "int8"],
)
@pytest.mark.parametrize("options", [{}, {"window": 37, "softcap": 5.0}], ids=str)
def test_a_token_has_the_same_bits_in_any_step(options, make, dtype, device, launched):
    """Decoded alone or among others, or in a prompt that is computed at once or in chunks.

    Each token has the same place in its tile, which is of 32 tokens in the interpreter: there a
    place may change bits.
    """
    paged = make([321, 70, 9], 2, 16, 8, dtype, device)
    options = options | paged.scales
    attention = BatchInvariantAttention(4, device)
    query = torch.randn(321, 4, 16, device=device)
    whole = attend(attention, query, paged, [], [(0, 0, 321)], options)
    alone = attend(attention, query[320:], paged, [0], [], options)
    assert torch.equal(alone[0], whole[320])
    mixed = torch.cat([torch.randn(2, 4, 16, device=device), query[320:]])
    among = attend(attention, mixed, paged, [1, 2, 0], [], options)
    assert torch.equal(among[2], whole[320])
    beside = torch.cat([query[320:], query[64:140], torch.randn(5, 4, 16, device=device)])
    step = attend(attention, beside, paged, [0], [(0, 64, 140), (1, 65, 70)], options)
    assert torch.equal(step[0], whole[320])
    assert torch.equal(step[1:77], whole[64:140])
    fused = [given["enable_fp_fusion"] for kernel, given in launched if kernel is KERNEL]
    assert fused, "Triton's kernels attend"
    assert not any(fused), "else products and sums are fused where a tile has no mask"


def test_it_is_the_same_attention(device):
    paged = make_paged([330, 70, 9], 2, 16, 8, torch.float32, device)
    query = torch.randn(3, 4, 16, device=device)
    ours = attend(BatchInvariantAttention(3, device), query, paged, [0, 1, 2], [], {})
    expected = ops.paged_attention_decode(query, *paged.args, SCALE)
    assert_close(ours, expected)

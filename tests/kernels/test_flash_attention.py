"""The use of FlashAttention-3, with a fake that computes what its documentation says."""

import pytest
import torch

from kernels import ops
from kernels.flash_attention import FlashAttention, supports
from kernels.sequences import Sequences
from tests.kernels.tensors import dense_attention, make_paged, make_quantized
from tests.kernels.tolerance import assert_close


class FakeFlashAttention:
    """A fake of `flash_attn_with_kvcache`, with the same argument names."""

    def __init__(self):
        self.num_calls = 0

    def __call__(
        self,
        q,
        k_cache,
        v_cache,
        *,
        cache_seqlens,
        page_table,
        cu_seqlens_q=None,
        max_seqlen_q=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
    ):
        self.num_calls += 1
        assert causal
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert cache_seqlens.dtype == page_table.dtype == torch.int32
        batch = len(page_table)
        if cu_seqlens_q is None:
            assert q.shape[:2] == (batch, 1)
            starts, tokens = list(range(batch + 1)), q.flatten(0, 1)
        else:
            assert q.dim() == 3
            starts, tokens = cu_seqlens_q.tolist(), q
            lens = cu_seqlens_q.diff().tolist()
            assert len(lens) == batch
            assert max(lens) == max_seqlen_q
        out = torch.full_like(tokens, torch.nan)
        left, right = window_size
        assert right == (-1 if left == -1 else 0)
        for seq, seq_len in enumerate(cache_seqlens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            if seq_len == 0:
                continue
            keys, values = (
                cache[page_table[seq].long()].flatten(0, 1)[:seq_len]
                for cache in (k_cache, v_cache)
            )
            out[rows] = dense_attention(
                tokens[rows],
                keys,
                values,
                softmax_scale,
                window=None if left == -1 else left + 1,
                softcap=softcap or None,
            )
        return out.view(q.shape)


OPTIONS = [{}, {"window": 37}, {"softcap": 1.5}, {"window": 5, "softcap": 0.7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_gets_what_gives_the_same_results(options):
    """Decodes come first in query and output, then chunks, then rows of no sequence."""
    paged = make_paged([9, 70, 33, 40], 2, 16, 8, torch.float16, "cpu")
    query = torch.randn(2 + 33 + 7 + 3, 4, 16).half()
    caches = paged.key_cache, paged.value_cache
    starts = torch.tensor([2, 35, 42], dtype=torch.int32)
    decodes = Sequences(paged.block_tables[:2], paged.seq_lens[:2])
    chunks = Sequences(paged.block_tables[2:], paged.seq_lens[2:], starts, 33)
    fake = FakeFlashAttention()
    outs = []
    for attention in (ops, FlashAttention(fake)):
        out = torch.zeros(len(query), 4, 16).half()
        attention.prepare_prefill(query, *caches, 0.3, out=out, **options)(chunks)
        attention.prepare_decode(query, *caches, 0.3, out=out, **options)(decodes)
        outs.append(out[:42])
    assert fake.num_calls == 2
    assert_close(*reversed(outs))


def test_what_it_does_not_support_goes_to_our_kernels():
    paged = make_paged([9, 70], 2, 16, 8, torch.float32, "cpu")
    quantized = make_quantized([9, 70], 2, 16, 8, torch.int8, "cpu")
    latent = make_paged([9, 70], 1, 24, 8, torch.float16, "cpu").latent(16)
    fake = FakeFlashAttention()
    for query, of, options in (
        (torch.randn(2, 4, 16), paged, {}),
        (torch.randn(2, 4, 16).half(), quantized, quantized.scales),
        (torch.randn(2, 4, 24).half(), latent, {}),
    ):
        caches = of.key_cache, of.value_cache
        outs = []
        for attention in (ops, FlashAttention(fake)):
            out = query.new_zeros(2, 4, 16)
            attend = attention.prepare_decode(query, *caches, 0.3, out=out, **options)
            attend(Sequences(of.block_tables, of.seq_lens))
            outs.append(out)
        assert torch.equal(*outs)
    assert fake.num_calls == 0


def test_it_supports_16_bit_heads_of_at_most_256_without_sinks():
    def asked(dtype, head_dim, **options):
        cache = torch.zeros(1, 16, 2, head_dim, dtype=dtype)
        return supports(torch.zeros(1, 4, head_dim, dtype=dtype), cache, cache, **options)

    assert asked(torch.bfloat16, 128)
    assert asked(torch.float16, 256, window=5, softcap=2.0, key_scales=None)
    assert not asked(torch.bfloat16, 512)
    assert not asked(torch.bfloat16, 20)
    assert not asked(torch.float32, 128)
    assert not asked(torch.bfloat16, 128, sinks=torch.zeros(4))

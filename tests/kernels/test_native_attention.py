import ctypes
from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.cpu import ops as in_c
from kernels.cpu.fields import num_partials
from kernels.cpu.library import native
from kernels.ops import paged_attention_decode, paged_attention_prefill
from tests.kernels.tensors import (
    dense_attention,
    far_apart,
    make_paged,
    make_quantized,
    options,
    strided,
)
from tests.kernels.tolerance import assert_close

SHAPES = [  # H, HKV, D, P
    (2, 2, 16, 4),
    (6, 2, 40, 5),
    (16, 1, 64, 16),
    (20, 1, 24, 16),
    (3, 1, 7, 3),
    (8, 2, 128, 16),
    (100, 1, 16, 16),
]
SHAPE_NAMES = ("num_heads", "num_kv_heads", "head_dim", "block_size")
CHUNKS = [(33, 33), (0, 0), (1, 70), (65, 65), (7, 23), (20, 150), (1, 1100), (100, 700)]

native_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def starts_of(query_lens):
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)


@native_dtypes
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_decode_is_the_twin_s(num_heads, num_kv_heads, head_dim, block_size, dtype):
    seq_lens = [1, 0, block_size, 67, 256, 300, 600, 1100]
    paged = make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, "cpu")
    query = strided((len(seq_lens), num_heads, head_dim), dtype, "cpu")
    args = query, *paged.args, head_dim**-0.5
    assert_close(paged_attention_decode(*args), reference.paged_attention_decode(*args))


@native_dtypes
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_prefill_is_the_twin_s(num_heads, num_kv_heads, head_dim, block_size, dtype):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, "cpu")
    query = strided((sum(query_lens) + 3, num_heads, head_dim), dtype, "cpu")
    args = query, *paged.args, starts_of(query_lens), max(query_lens), head_dim**-0.5
    assert_close(paged_attention_prefill(*args), reference.paged_attention_prefill(*args))


@native_dtypes
@pytest.mark.parametrize("which", range(len(options(4, "cpu"))))
def test_options_are_the_twin_s_and_what_they_are_defined_to_be(which, dtype):
    chosen = options(4, "cpu")[which]
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, 2, 40, 16, dtype, "cpu")
    starts = starts_of(query_lens)
    query = torch.randn(sum(query_lens), 4, 40).to(dtype)
    prefilled = paged_attention_prefill(query, *paged.args, starts, max(query_lens), 0.4, **chosen)
    last = (starts[1:] - 1).clamp(min=0)
    decoded = paged_attention_decode(query[last], *paged.args, 0.4, **chosen)
    for seq, query_len in enumerate(query_lens):
        if query_len == 0:
            assert decoded[seq].count_nonzero() == 0
            continue
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        expected = dense_attention(query[rows], *paged.dense(seq), 0.4, **chosen)
        assert_close(prefilled[rows], expected)
        assert torch.equal(decoded[seq], prefilled[rows][-1])


@native_dtypes
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_depends_on_nothing_but_its_own_sequence(window, num_threads, dtype):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, 2, 32, 16, dtype, "cpu")
    starts = starts_of(query_lens)
    query = torch.randn(sum(query_lens), 6, 32).to(dtype)
    args = query, *paged.args, starts, max(query_lens), 0.2
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = paged_attention_prefill(*args, window=window)
    finally:
        torch.set_num_threads(before)
    for seq, (query_len, seq_len) in enumerate(CHUNKS):
        for row in range(query_len):
            alone = paged_attention_decode(
                query[starts[seq] + row : starts[seq] + row + 1],
                paged.key_cache,
                paged.value_cache,
                paged.block_tables[seq : seq + 1],
                torch.tensor([seq_len - query_len + row + 1], dtype=torch.int32),
                0.2,
                window=window,
            )
            assert torch.equal(alone[0], together[starts[seq] + row])


def attend_among(others, query, paged, rows, **chosen):
    """The result for these rows of `query`, tokens of sequence 1 of 3.

    The step has the last tokens of the other sequences, too, if `others` says how many of each.
    """
    chunk, num_rows = query[rows], rows.stop - rows.start
    seq_lens, scale = paged.seq_lens.clone(), query.shape[2] ** -0.5
    seq_lens[1] += rows.stop - len(query)
    keys, values, tables, _ = paged.args
    if not others and num_rows == 1:
        args = chunk, keys, values, tables[1:2], seq_lens[1:2], scale
        return paged_attention_decode(*args, **chosen)
    if not others:
        args = chunk, keys, values, tables[1:2], seq_lens[1:2], starts_of([num_rows]), num_rows
        return paged_attention_prefill(*args, scale, **chosen)
    lens = others[0], num_rows, others[1]
    before, after = (torch.randn(n, *query.shape[1:]).to(query.dtype) for n in others)
    args = torch.cat([before, chunk, after]), keys, values, tables, seq_lens, starts_of(lens)
    out = paged_attention_prefill(*args, max(lens), scale, **chosen)
    return out[others[0] : others[0] + num_rows]


@native_dtypes
@pytest.mark.parametrize("num_cached", [0, 480])
@pytest.mark.parametrize("chosen", [{}, {"window": 60, "softcap": 1.5}], ids=["plain", "options"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (14, 2), (32, 8)])
def test_chunks_of_any_size_give_the_bits_of_the_whole_prompt(
    num_heads, num_kv_heads, head_dim, chosen, num_cached, dtype
):
    num_tokens = 80
    seq_lens = [40, num_cached + num_tokens, 90]
    paged = make_paged(seq_lens, num_kv_heads, head_dim, 16, dtype, "cpu")
    query = torch.randn(num_tokens, num_heads, head_dim).to(dtype)
    whole = attend_among(None, query, paged, slice(0, num_tokens), **chosen)
    only = replace(paged, block_tables=paged.block_tables[1:2], seq_lens=paged.seq_lens[1:2])
    args = query, *only.args, starts_of([num_tokens]), num_tokens, head_dim**-0.5
    assert_close(whole, reference.paged_attention_prefill(*args, **chosen))
    for chunk in 1, 7, 16, 64, num_tokens:
        for number, first in enumerate(range(0, num_tokens, chunk)):
            rows = slice(first, min(first + chunk, num_tokens))
            others = [(1, 5), None, (20, 3)][number % 3]
            out = attend_among(others, query, paged, rows, **chosen)
            assert torch.equal(out, whole[rows]), (chunk, first, others)


LATENT_SHAPES = [  # H, D, DV, P
    (16, 576, 512, 16),
    (128, 80, 64, 16),
    (3, 28, 20, 5),
    (4, 96, 64, 16),  # few rows
]


@native_dtypes
@pytest.mark.parametrize(("num_heads", "head_dim", "value_dim", "block_size"), LATENT_SHAPES)
def test_values_may_be_a_part_of_the_keys(num_heads, head_dim, value_dim, block_size, dtype):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    scale = 0.5 * head_dim**-0.5
    paged = make_paged(seq_lens, 1, head_dim, block_size, dtype, "cpu").latent(value_dim)
    starts = starts_of(query_lens)
    query = strided((sum(query_lens) + 3, num_heads, head_dim), dtype, "cpu")
    args = query, *paged.args, starts, max(query_lens), scale
    prefilled = paged_attention_prefill(*args)
    assert_close(prefilled, reference.paged_attention_prefill(*args))
    assert_close(prefilled[:33], dense_attention(query[:33], *paged.dense(0), scale))
    copied = replace(paged, value_cache=paged.value_cache.contiguous())
    assert torch.equal(
        prefilled,
        paged_attention_prefill(query, *copied.args, starts, max(query_lens), scale),
    )
    last = (starts[1:] - 1).clamp(min=0)
    decoded = paged_attention_decode(query[last], *paged.args, scale)
    for seq, query_len in enumerate(query_lens):
        if query_len:
            assert torch.equal(decoded[seq], prefilled[last[seq]])


@native_dtypes
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_part_of_quantized_keys_gives_what_its_numbers_give(stored, dtype):
    paged = make_quantized([150, 9, 600], 1, 96, 16, stored, "cpu").latent(64)
    plain = paged.dequantized(dtype)
    query = torch.randn(3, 20, 96).to(dtype)
    decoded = paged_attention_decode(query, *paged.args, 0.1, **paged.scales)
    assert torch.equal(decoded, paged_attention_decode(query, *plain.args, 0.1))


class InShares:
    """The library's attention, computed in shares, from the last to the first."""

    def __init__(self, num_shares):
        self._num_shares = num_shares

    def attention(self, *fields):
        _, _, num_seqs, num_tokens, num_heads, _, _, value_dim, block_size = fields[:9]
        out, partials = fields[19:21]
        max_len = fields[-3] * block_size
        num_floats = num_partials(num_heads, value_dim, num_seqs, max_len)
        ctypes.memset(out, 0xFF, 2 * num_tokens * num_heads * value_dim)  # NaN
        ctypes.memset(partials, 0xFF, 4 * num_floats)
        for kernel in (native().attention, native().merge_splits):
            share = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
            do_share = share(kernel.share_address)
            for index in reversed(range(self._num_shares)):
                do_share(kernel.pack(*fields), index, self._num_shares)


@pytest.mark.skipif(native() is None, reason="needs native code")
@pytest.mark.parametrize("num_shares", [2, 5, 64, 256])
@pytest.mark.parametrize("window", [None, 600])
def test_any_number_of_shares_does_all_of_it(window, num_shares):
    chunks = [*CHUNKS, (1, 513), (1, 3), (0, 0), (1, 1600)]
    query_lens, seq_lens = zip(*chunks, strict=True)
    paged = make_paged(seq_lens, 2, 32, 16, torch.bfloat16, "cpu")
    query = torch.randn(sum(query_lens) + 3, 6, 32).bfloat16()
    args = query, *paged.args, starts_of(query_lens), max(query_lens), 0.2
    whole = paged_attention_prefill(*args, window=window)
    in_shares = in_c.paged_attention_prefill(InShares(num_shares), *args, window=window)
    assert torch.equal(in_shares, whole)


@native_dtypes
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_a_quantized_cache_gives_what_its_numbers_times_their_scales_give(
    num_heads, num_kv_heads, head_dim, block_size, stored, dtype
):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_quantized(seq_lens, num_kv_heads, head_dim, block_size, stored, "cpu")
    plain = paged.dequantized(dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    rest = starts_of(query_lens), max(query_lens), head_dim**-0.5
    prefilled = paged_attention_prefill(query, *paged.args, *rest, **paged.scales)
    assert torch.equal(prefilled, paged_attention_prefill(query, *plain.args, *rest))
    last = (starts_of(query_lens)[1:] - 1).clamp(min=0)
    decoded = paged_attention_decode(query[last], *paged.args, head_dim**-0.5, **paged.scales)
    assert torch.equal(decoded, paged_attention_decode(query[last], *plain.args, head_dim**-0.5))


@native_dtypes
@pytest.mark.parametrize("num_heads", range(1, 10))
def test_few_heads_give_what_they_give_among_many(num_heads, dtype):
    paged = make_paged([150], 1, 64, 16, dtype, "cpu")
    query = torch.randn(1, 30, 64).to(dtype)
    few = paged_attention_decode(query[:, :num_heads].contiguous(), *paged.args, 0.125)
    many = paged_attention_decode(query, *paged.args, 0.125)
    assert torch.equal(few, many[:, :num_heads])


@pytest.mark.parametrize("chunk", [1, 20])
def test_slots_behind_every_window_are_not_read(chunk):
    paged = make_paged([530], 2, 16, 8, torch.float32, "cpu")
    query, starts = torch.randn(chunk, 4, 16), torch.tensor([0, chunk], dtype=torch.int32)
    args = query, *paged.args, starts, chunk, 0.25
    before = paged_attention_prefill(*args, window=300)
    behind = paged.block_tables[0, : (530 - chunk - 300 + 1) // 8].long()
    paged.key_cache[behind] = paged.value_cache[behind] = float("nan")
    assert torch.equal(paged_attention_prefill(*args, window=300), before)


@native_dtypes
@pytest.mark.parametrize("decode", [False, True])
def test_slots_past_the_sequence_are_not_read(decode, dtype):
    paged = make_paged([21], 2, 16, 8, dtype, "cpu")
    query = torch.randn(1, 4, 16).to(dtype)

    def attend():
        if decode:
            return paged_attention_decode(query, *paged.args, 0.25)
        return paged_attention_prefill(query, *paged.args, starts_of([1]), 1, 0.25)

    before = attend()
    tail = paged.block_tables[0, 2]
    paged.key_cache[tail, 21 - 16 :] = float("nan")
    paged.value_cache[tail, 21 - 16 :] = float("nan")
    paged.block_tables[0, 3:] = 2**31 - 1
    assert torch.equal(attend(), before)


@native_dtypes
def test_values_that_are_not_finite_stay_so(dtype):
    paged = make_paged([40], 1, 16, 8, dtype, "cpu")
    query = torch.randn(1, 2, 16).to(dtype)
    query[0, 1, 3] = float("nan")
    out = paged_attention_decode(query, *paged.args, 0.25)
    assert out[0, 0].isfinite().all()
    assert out[0, 1].isnan().all()


def test_decode_reaches_past_int32_offsets():
    cache = far_apart((3, 8, 2, 16), torch.bfloat16, "cpu")
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    seq_lens = torch.tensor([6], dtype=torch.int32)
    query = torch.randn(1, 2, 16, dtype=torch.bfloat16)
    args = query, cache[:, :4], cache[:, 4:], tables, seq_lens, 0.25
    assert_close(paged_attention_decode(*args), reference.paged_attention_decode(*args))


def test_a_dtype_without_native_code_runs_in_the_twin():
    paged = make_paged([21], 2, 16, 8, torch.float16, "cpu")
    args = torch.randn(1, 4, 16).half(), *paged.args, 0.25
    assert torch.equal(paged_attention_decode(*args), reference.paged_attention_decode(*args))


def test_attention_names_what_does_not_fit():
    paged = make_paged([5, 5], 2, 16, 8, torch.float32, "cpu")
    keys, values, tables, lens = paged.args
    query = torch.randn(2, 4, 16)
    with pytest.raises(ValueError, match="query has 3 heads; it must be a multiple of 2"):
        paged_attention_decode(query[:, :3], keys, values, tables, lens, 1.0)
    with pytest.raises(ValueError, match=r"block_tables has dtype torch\.int64"):
        paged_attention_decode(query, keys, values, tables.long(), lens, 1.0)
    with pytest.raises(ValueError, match="block_tables has 2 rows, required are 1"):
        paged_attention_decode(query[:1], keys, values, tables, lens, 1.0)
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); it must be \(4,\)"):
        paged_attention_decode(query, keys, values, tables, lens, 1.0, sinks=torch.ones(3))
    starts = starts_of([1, 1]).long()
    with pytest.raises(ValueError, match=r"query_start_loc has dtype torch\.int64"):
        paged_attention_prefill(query, keys, values, tables, lens, starts, 1, 1.0)

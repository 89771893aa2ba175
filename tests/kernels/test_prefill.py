from types import SimpleNamespace

import pytest
import torch

from kernels import ops, reference
from kernels.triton import configs as tuned
from kernels.triton.attention import prefill
from kernels.triton.attention.decode import paged_attention_decode
from kernels.triton.attention.prefill import paged_attention_prefill
from tests.kernels.tensors import dense_attention, far_apart, make_paged, options, strided
from tests.kernels.tolerance import assert_close, every_dot_dtype, every_dtype

SHAPES = [(2, 2, 16, 4), (6, 2, 40, 5), (16, 1, 64, 16), (65, 1, 16, 16)]  # H, HKV, D, P
SHAPE_NAMES = ("num_heads", "num_kv_heads", "head_dim", "block_size")

# (query_len, seq_len): a whole prompt, a padding row, a decode token, one more than a tile, a
# chunk after a prefix hit, the last of several chunks.
CHUNKS = [(33, 33), (0, 0), (1, 70), (65, 65), (7, 23), (20, 150)]


def starts_of(query_lens, device):
    return torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)


@every_dot_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_prefill_is_the_twin_s(num_heads, num_kv_heads, head_dim, block_size, dtype, device):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, device)
    num_tokens = sum(query_lens) + 3  # rows of no sequence
    query = strided((num_tokens, num_heads, head_dim), dtype, device)
    starts = starts_of(query_lens, device)
    args = query, *paged.args, starts, max(query_lens), head_dim**-0.5
    assert_close(paged_attention_prefill(*args), reference.paged_attention_prefill(*args))


@every_dot_dtype
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "value_dim", "block_size"),
    [(16, 80, 64, 16), (20, 28, 20, 5), (66, 20, 16, 16)],
)
def test_values_may_be_a_part_of_the_keys(
    num_heads, head_dim, value_dim, block_size, dtype, device
):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, 1, head_dim, block_size, dtype, device).latent(value_dim)
    query = strided((sum(query_lens) + 3, num_heads, head_dim), dtype, device)
    starts = starts_of(query_lens, device)
    args = query, *paged.args, starts, max(query_lens), head_dim**-0.5
    out = paged_attention_prefill(*args)
    assert out.shape == (len(query), num_heads, value_dim)
    assert_close(out, reference.paged_attention_prefill(*args))


@every_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_the_twin_is_causal_attention(num_heads, num_kv_heads, head_dim, block_size, dtype):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, "cpu")
    query = strided((sum(query_lens) + 3, num_heads, head_dim), dtype, "cpu")
    starts = starts_of(query_lens, "cpu")
    out = reference.paged_attention_prefill(query, *paged.args, starts, max(query_lens), 0.3)
    for seq in (0, 2, 3, 4, 5):
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        assert_close(out[rows], dense_attention(query[rows], *paged.dense(seq), 0.3))
    assert out[-3:].count_nonzero() == 0


@every_dot_dtype
def test_options_are_the_twin_s(dtype, device):
    query_lens, seq_lens = zip(*CHUNKS, (90, 330), strict=True)
    paged = make_paged(seq_lens, 2, 40, 5, dtype, device)
    query = strided((sum(query_lens) + 3, 6, 40), dtype, device)
    args = query, *paged.args, starts_of(query_lens, device), max(query_lens), 0.3
    for chosen in options(6, device):
        expected = reference.paged_attention_prefill(*args, **chosen)
        assert_close(paged_attention_prefill(*args, **chosen), expected)


@pytest.mark.parametrize("value_dim", [16, 12])  # the second: of latents
def test_positions_are_split_where_tiles_do_not_fill_the_device(value_dim, device, monkeypatch):
    monkeypatch.setattr(prefill, "_LEAST_POSITIONS", 64)
    query_lens, seq_lens = (5, 0, 1, 33, 4), (200, 0, 70, 130, 0)
    paged = make_paged(seq_lens, 1, 16, 5, torch.float16, device)
    if value_dim < 16:
        paged = paged.latent(value_dim)
    query = strided((sum(query_lens) + 3, 2, 16), torch.float16, device)
    args = query, *paged.args, starts_of(query_lens, device), max(query_lens), 0.3
    sinks = torch.tensor([0.5, -1.0], device=device)
    for chosen in ({}, {"window": 70, "softcap": 5.0, "sinks": sinks}, {"sinks": sinks}):
        expected = reference.paged_attention_prefill(*args, **chosen)
        monkeypatch.setattr(prefill, "num_processors", lambda _: 132)
        split = paged_attention_prefill(*args, **chosen)
        assert_close(split, expected)
        monkeypatch.setattr(prefill, "num_processors", lambda _: 1)
        whole = paged_attention_prefill(*args, **chosen)
        assert not torch.equal(whole, split)  # the last bits show that positions were split


def test_the_dims_of_wide_values_are_shared_by_programs(device, monkeypatch):
    config = tuned.PrefillConfig(32, 64, num_warps=4, num_stages=1, value_dims=16)
    monkeypatch.setattr(prefill, "_LEAST_POSITIONS", 64)
    query_lens, seq_lens = (33, 7), (33, 200)
    paged = make_paged(seq_lens, 1, 64, 8, torch.float32, device)
    query = torch.randn(sum(query_lens), 3, 64, device=device)
    args = query, *paged.args, starts_of(query_lens, device), max(query_lens), 0.1
    expected = reference.paged_attention_prefill(*args)
    for processors in (1, 132):  # positions whole, and split
        monkeypatch.setattr(prefill, "num_processors", lambda _, found=processors: found)
        with tuned.forced(config):
            assert_close(paged_attention_prefill(*args), expected)


def test_a_tile_is_split_into_as_many_parts_as_there_are_processors(device, monkeypatch):
    """It is not split if tiles and heads suffice, or if it has too few positions."""
    grids = []

    class Counted(prefill.Launch):
        def __call__(self, grid, variant, **changing):
            grids.append(grid)
            super().__call__(grid, variant, **changing)

    monkeypatch.setattr(prefill, "Launch", Counted)
    monkeypatch.setattr(prefill, "_LEAST_POSITIONS", 64)
    paged = make_paged([600], 2, 16, 8, torch.float32, device)
    query = torch.randn(64, 2, 16, device=device)
    for processors, num_tokens, num_splits in ((8, 4, 4), (8, 64, 4), (8, 128, 2), (2, 4, 1)):
        monkeypatch.setattr(prefill, "num_processors", lambda _, found=processors: found)
        grids.clear()
        queries = query.repeat(2, 1, 1)[:num_tokens]
        starts = starts_of([num_tokens], device)
        paged_attention_prefill(queries, *paged.args, starts, num_tokens, 0.25)
        assert grids[0][1:] == (2, num_splits)
        assert grids[1:] == ([] if num_splits == 1 else [(num_tokens, 2, 1)])


@every_dtype
def test_the_twin_s_options_are_by_definition(dtype):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, 2, 16, 5, dtype, "cpu")
    query = strided((sum(query_lens), 6, 16), dtype, "cpu")
    starts = starts_of(query_lens, "cpu")
    args = query, *paged.args, starts, max(query_lens), 0.3
    for chosen in options(6, "cpu"):
        out = reference.paged_attention_prefill(*args, **chosen)
        for seq in (0, 2, 3, 4, 5):
            rows = slice(int(starts[seq]), int(starts[seq + 1]))
            assert_close(out[rows], dense_attention(query[rows], *paged.dense(seq), 0.3, **chosen))


@pytest.mark.parametrize("attend", [paged_attention_prefill, reference.paged_attention_prefill])
def test_slots_before_every_window_are_not_read(attend, device):
    paged = make_paged([530], 2, 16, 8, torch.float32, device)
    query = torch.randn(20, 4, 16, device=device)
    args = query, *paged.args, starts_of([20], device), 20, 0.25
    before = attend(*args, window=300)
    paged.block_tables[0, : (530 - 19 - 300) // 8] = 2**31 - 1
    assert torch.equal(attend(*args, window=300), before)


@pytest.mark.parametrize("attend", [paged_attention_prefill, reference.paged_attention_prefill])
def test_a_chunk_does_not_depend_on_its_batch(attend, device):
    query_lens, seq_lens = zip(*CHUNKS, strict=True)
    paged = make_paged(seq_lens, 2, 32, 16, torch.float32, device)
    starts = starts_of(query_lens, device)
    query = torch.randn(sum(query_lens), 6, 32, device=device)
    together = attend(query, *paged.args, starts, max(query_lens), 0.2)
    for seq, query_len in enumerate(query_lens):
        if query_len == 0:
            continue
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        alone = attend(
            query[rows],
            paged.key_cache,
            paged.value_cache,
            paged.block_tables[seq : seq + 1],
            paged.seq_lens[seq : seq + 1],
            starts_of([query_len], device),
            query_len,
            0.2,
        )
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("chunk", [1, 16, 40])
@pytest.mark.parametrize("attend", [paged_attention_prefill, reference.paged_attention_prefill])
def test_a_prompt_in_chunks_is_the_prompt_at_once(attend, chunk, device):
    paged = make_paged([70], 1, 16, 8, torch.float32, device)
    keys, values, tables, lens = paged.args
    query = torch.randn(70, 2, 16, device=device)
    at_once = attend(query, keys, values, tables, lens, starts_of([70], device), 70, 0.25)
    for start in range(0, 70, chunk):
        part = query[start : start + chunk]
        seq_len = torch.tensor([start + len(part)], dtype=torch.int32, device=device)
        starts = starts_of([len(part)], device)
        out = attend(part, keys, values, tables, seq_len, starts, len(part), 0.25)
        assert_close(out, at_once[start : start + chunk])


def test_the_twin_gives_the_same_bits_when_a_prompt_is_cut_at_64():
    paged = make_paged([200], 2, 32, 16, torch.float32, "cpu")
    keys, values, tables, lens = paged.args
    query = torch.randn(200, 4, 32)
    attend = reference.paged_attention_prefill
    at_once = attend(query, keys, values, tables, lens, starts_of([200], "cpu"), 200, 0.25)
    starts = starts_of([72], "cpu")
    assert torch.equal(attend(query[128:], *paged.args, starts, 72, 0.25), at_once[128:])


def test_one_token_chunks_of_the_twin_are_decode_to_the_bit():
    paged = make_paged([30, 7], 2, 16, 8, torch.float32, "cpu")
    query = torch.randn(2, 4, 16)
    starts = starts_of([1, 1], "cpu")
    as_chunks = reference.paged_attention_prefill(query, *paged.args, starts, 1, 0.25)
    assert torch.equal(as_chunks, reference.paged_attention_decode(query, *paged.args, 0.25))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "rows"), [(80, 64, 128), (96, 128, 16), (256, 32, 32)]
)
def test_tiles_of_any_size_fit_any_blocks(head_dim, block_size, rows, device):
    config = tuned.PrefillConfig(rows, positions=32, num_warps=4, num_stages=1)
    paged = make_paged([40, 100, 3], 1, head_dim, block_size, torch.float16, device)
    query = torch.randn(50, 3, head_dim, device=device).half()
    args = query, *paged.args, starts_of([40, 7, 3], device), 40, head_dim**-0.5
    with tuned.forced(config):
        out = paged_attention_prefill(*args)
    assert_close(out, reference.paged_attention_prefill(*args))


def test_a_layer_major_pool_gives_the_same_bits(device):
    paged = make_paged([90, 20], 2, 32, 16, torch.float32, device)
    query = torch.randn(40, 6, 32, device=device)
    pool = torch.zeros(3, 2, *paged.key_cache.shape, device=device)  # [layer, k|v, B, P, HKV, D]
    pool[1, 0], pool[1, 1] = paged.key_cache, paged.value_cache
    rest = *paged.args[2:], starts_of([20, 20], device), 20, 0.2
    block_major = paged_attention_prefill(query, paged.key_cache, paged.value_cache, *rest)
    assert torch.equal(paged_attention_prefill(query, pool[1, 0], pool[1, 1], *rest), block_major)


def test_prefill_reaches_past_int32_offsets(device):
    cache = far_apart((3, 8, 2, 16), torch.float16, device)
    tables = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([6], dtype=torch.int32, device=device)
    query = far_apart((3, 2, 16), torch.float16, device)
    args = query, cache[:, :4], cache[:, 4:], tables, seq_lens, starts_of([3], device), 3, 0.25
    assert_close(paged_attention_prefill(*args), reference.paged_attention_prefill(*args))


def test_prefill_names_what_does_not_fit(device):
    paged = make_paged([5], 2, 16, 8, torch.float32, device)
    query = torch.randn(5, 4, 16, device=device)
    with pytest.raises(ValueError, match="max_query_len is 6; it must be at most 5"):
        paged_attention_prefill(query, *paged.args, starts_of([5], device), 6, 1.0)
    with pytest.raises(ValueError, match=r"query_start_loc has shape \(3,\); it must be \(2,\)"):
        paged_attention_prefill(query, *paged.args, starts_of([2, 3], device), 3, 1.0)


@every_dot_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_chunks_and_decodes_share_a_query_and_an_output(
    num_heads, num_kv_heads, head_dim, block_size, dtype, device
):
    """Decodes come first, then chunks, then rows of no sequence."""
    query_lens, seq_lens = (1, 1, 1, *(33, 1, 65, 7)), (1, 70, 33, *(33, 70, 65, 23))
    launchers = SimpleNamespace(
        paged_attention_decode=paged_attention_decode,
        paged_attention_prefill=paged_attention_prefill,
    )
    paged = make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, device)
    query = strided((sum(query_lens) + 3, num_heads, head_dim), dtype, device)
    starts = starts_of(query_lens, device)
    scale = head_dim**-0.5
    keys, values, tables, lens = paged.args
    decodes = keys, values, tables[:3], lens[:3]
    chunks = keys, values, tables[3:], lens[3:]
    for code in (launchers, ops, reference):
        out = torch.full_like(query.contiguous(), torch.nan)
        same = code.paged_attention_prefill(query, *chunks, starts[3:], 65, scale, out=out)
        assert same is out
        assert code.paged_attention_decode(query, *decodes, scale, out=out) is out
        rest = starts[3:] - 3
        chunked = code.paged_attention_prefill(query[3:], *chunks, rest, 65, scale)
        assert torch.equal(out[3:-3], chunked[:-3])
        assert torch.equal(out[:3], code.paged_attention_decode(query[:3], *decodes, scale))


def test_an_output_that_does_not_fit_is_named(device):
    paged = make_paged([5], 2, 16, 8, torch.float32, device)
    query = torch.randn(5, 4, 16, device=device)
    starts = starts_of([5], device)
    with pytest.raises(ValueError, match=r"out has shape \(4, 4, 16\); it must be \(5, 4, 16\)"):
        paged_attention_prefill(query, *paged.args, starts, 5, 1.0, out=query[:4])
    with pytest.raises(ValueError, match="it must be contiguous"):
        paged_attention_decode(
            query, *paged.args, 1.0, out=torch.empty(5, 4, 32, device=device)[..., :16]
        )
    with pytest.raises(ValueError, match="block_tables has 1 rows, required are 5"):
        paged_attention_decode(query, *paged.args, 1.0)

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.triton import configs as tuned
from kernels.triton.attention import decode
from kernels.triton.attention.decode import paged_attention_decode
from tests.kernels.tensors import (
    dense_attention,
    far_apart,
    make_paged,
    make_quantized,
    options,
    strided,
)
from tests.kernels.tolerance import assert_close, every_dot_dtype, every_dtype

SHAPES = [(2, 2, 16, 4), (6, 2, 40, 5), (16, 1, 64, 16), (20, 1, 24, 16)]  # H, HKV, D, P
SHAPE_NAMES = ("num_heads", "num_kv_heads", "head_dim", "block_size")


@every_dot_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_decode_is_the_twin_s(num_heads, num_kv_heads, head_dim, block_size, dtype, device):
    seq_lens = [1, 0, block_size, 67, 256, 300, 600]
    paged = make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, device)
    query = strided((len(seq_lens), num_heads, head_dim), dtype, device)
    args = query, *paged.args, head_dim**-0.5
    assert_close(paged_attention_decode(*args), reference.paged_attention_decode(*args))


LATENT_SHAPES = [(16, 80, 64, 16), (20, 28, 20, 5), (40, 40, 32, 32), (3, 37, 16, 4)]  # H, D, DV, P
LATENT_NAMES = ("num_heads", "head_dim", "value_dim", "block_size")


@every_dot_dtype
@pytest.mark.parametrize(LATENT_NAMES, LATENT_SHAPES)
def test_values_may_be_a_part_of_the_keys(
    num_heads, head_dim, value_dim, block_size, dtype, device
):
    seq_lens = [1, 0, block_size, 67, 300, 600]
    paged = make_paged(seq_lens, 1, head_dim, block_size, dtype, device).latent(value_dim)
    query = strided((len(seq_lens), num_heads, head_dim), dtype, device)
    args = query, *paged.args, head_dim**-0.5
    out = paged_attention_decode(*args)
    assert out.shape == (len(seq_lens), num_heads, value_dim)
    assert_close(out, reference.paged_attention_decode(*args))
    expected = dense_attention(query[3:4], *paged.dense(3), head_dim**-0.5)
    assert_close(reference.paged_attention_decode(*args)[3:4], expected)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_they_may_be_quantized(stored, device):
    paged = make_quantized([130, 9, 0], 1, 80, 16, stored, device).latent(64)
    query = torch.randn(3, 40, 80, device=device)
    args, scales = (query, *paged.args, 0.1), paged.scales
    expected = reference.paged_attention_decode(*args, **scales)
    assert_close(paged_attention_decode(*args, **scales), expected)


def test_narrower_values_of_their_own_are_refused(device):
    paged = make_paged([5], 1, 32, 8, torch.float32, device)
    query, values = torch.randn(1, 4, 32, device=device), paged.value_cache[..., :16]
    rest = paged.block_tables, paged.seq_lens, 1.0
    with pytest.raises(ValueError, match=r"value_cache has head dim 16; it must be 32, or"):
        paged_attention_decode(query, paged.key_cache, values, *rest)


@every_dtype
@pytest.mark.parametrize(SHAPE_NAMES, SHAPES)
def test_the_twin_is_attention(num_heads, num_kv_heads, head_dim, block_size, dtype):
    seq_lens = [1, 0, block_size, 67]
    paged = make_paged(seq_lens, num_kv_heads, head_dim, block_size, dtype, "cpu")
    query = strided((len(seq_lens), num_heads, head_dim), dtype, "cpu")
    out = reference.paged_attention_decode(query, *paged.args, 0.3)
    for seq in (0, 2, 3):
        expected = dense_attention(query[seq : seq + 1], *paged.dense(seq), 0.3)
        assert_close(out[seq : seq + 1], expected)
    assert out[1].count_nonzero() == 0


@every_dot_dtype
def test_options_are_the_twin_s(dtype, device):
    seq_lens = [1, 0, 16, 67, 256, 300, 600]
    paged = make_paged(seq_lens, 2, 40, 5, dtype, device)
    query = strided((len(seq_lens), 6, 40), dtype, device)
    args = query, *paged.args, 0.3
    for chosen in options(6, device):
        expected = reference.paged_attention_decode(*args, **chosen)
        assert_close(paged_attention_decode(*args, **chosen), expected)


@every_dtype
def test_the_twin_s_options_are_by_definition(dtype):
    paged = make_paged([1, 16, 67, 300], 2, 16, 5, dtype, "cpu")
    query = strided((4, 6, 16), dtype, "cpu")
    for chosen in options(6, "cpu"):
        out = reference.paged_attention_decode(query, *paged.args, 0.3, **chosen)
        for seq in range(4):
            expected = dense_attention(query[seq : seq + 1], *paged.dense(seq), 0.3, **chosen)
            assert_close(out[seq : seq + 1], expected)


@pytest.mark.parametrize("attend", [paged_attention_decode, reference.paged_attention_decode])
def test_slots_before_the_window_are_not_read(attend, device):
    paged = make_paged([530], 2, 16, 8, torch.float32, device)
    query = torch.randn(1, 4, 16, device=device)
    before = attend(query, *paged.args, 0.25, window=300)
    paged.block_tables[0, : (530 - 300) // 8] = 2**31 - 1
    assert torch.equal(attend(query, *paged.args, 0.25, window=300), before)


def cut_as(**changes):
    """Set the configuration of decode attention."""
    shape = tuned.LaunchShape(dtype="float32", stored="float32", dims=16, group=1)
    config = tuned.config_of(tuned.DecodeConfig, torch.device("cpu"), shape)
    return tuned.forced(replace(config, **changes))


def test_splits_grow_when_a_sequence_outgrows_their_number(device):
    seq_lens = [64, 65, 130, 15, 0]  # splits of 16, 32 and 48 tokens
    paged = make_paged(seq_lens, 1, 16, 8, torch.float32, device)
    args = torch.randn(5, 2, 16, device=device), *paged.args, 0.25
    for chosen in [{}, *options(2, device)]:
        expected = reference.paged_attention_decode(*args, **chosen)
        with cut_as(positions=16, split=16, pieces_per_processor=2):
            assert_close(paged_attention_decode(*args, **chosen), expected)


def test_the_merge_is_launched_only_if_a_sequence_may_have_several_splits(device, monkeypatch):
    launched = []

    class Counted(decode.Launch):
        def __call__(self, grid, variant, **changing):
            launched.append(self._kernel.fn.__name__)
            super().__call__(grid, variant, **changing)

    monkeypatch.setattr(decode, "Launch", Counted)
    for seq_len, num_kernels in ((40, 1), (400, 2)):
        paged = make_paged([seq_len, 0], 2, 16, 8, torch.float32, device)
        args = torch.randn(2, 4, 16, device=device), *paged.args, 0.25
        out = torch.full((2, 4, 16), torch.nan, device=device)
        launched.clear()
        assert_close(
            paged_attention_decode(*args, out=out), reference.paged_attention_decode(*args)
        )
        assert len(launched) == num_kernels


@pytest.mark.parametrize("programs", [1, 3, 50])
def test_any_number_of_programs_shares_the_work(programs, device):
    seq_lens = [0, 310, 1, 0, 0, 33, 32, 5, 0]  # one long among many short, and padding rows
    paged = make_paged(seq_lens, 2, 16, 8, torch.float32, device)
    args = torch.randn(9, 4, 16, device=device), *paged.args, 0.25
    with cut_as(positions=16, split=32, programs_per_processor=programs):
        out = paged_attention_decode(*args)
    assert_close(out, reference.paged_attention_decode(*args))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [80, 96])
def test_tiles_fit_into_blocks_or_reach_over_them(block_size, head_dim, device):
    paged = make_paged([1, 130, 64], 1, head_dim, block_size, torch.float16, device)
    query = torch.randn(3, 4, head_dim, device=device).half()
    for chosen in [{}, {"window": 50}]:
        args = query, *paged.args, head_dim**-0.5
        expected = reference.paged_attention_decode(*args, **chosen)
        with cut_as(positions=32, split=64):
            assert_close(paged_attention_decode(*args, **chosen), expected)


def test_a_layer_major_pool_gives_the_same_bits(device):
    paged = make_paged([1, 0, 200, 77], 2, 32, 16, torch.float32, device)
    query = torch.randn(4, 6, 32, device=device)
    pool = torch.zeros(3, 2, *paged.key_cache.shape, device=device)  # [layer, k|v, B, P, HKV, D]
    pool[1, 0], pool[1, 1] = paged.key_cache, paged.value_cache
    assert pool[1, 0].stride() != paged.key_cache.stride()
    block_major = paged_attention_decode(query, *paged.args, 0.2)
    layer_major = paged_attention_decode(query, pool[1, 0], pool[1, 1], *paged.args[2:], 0.2)
    assert torch.equal(layer_major, block_major)


@pytest.mark.parametrize("attend", [paged_attention_decode, reference.paged_attention_decode])
def test_a_row_does_not_depend_on_its_batch(attend, device):
    seq_lens = [300, 5, 64, 520]
    paged = make_paged(seq_lens, 2, 32, 16, torch.float32, device)
    query = torch.randn(4, 6, 32, device=device)
    together = attend(query, *paged.args, 0.2)
    for seq, seq_len in enumerate(seq_lens):
        alone = attend(
            query[seq : seq + 1],
            paged.key_cache,
            paged.value_cache,
            paged.block_tables[seq : seq + 1, : -(-seq_len // 16)],
            paged.seq_lens[seq : seq + 1],
            0.2,
        )
        assert torch.equal(alone[0], together[seq])


@pytest.mark.parametrize("attend", [paged_attention_decode, reference.paged_attention_decode])
def test_slots_past_the_sequence_are_not_read(attend, device):
    paged = make_paged([21], 2, 16, 8, torch.float32, device)
    query = torch.randn(1, 4, 16, device=device)
    before = attend(query, *paged.args, 0.25)
    tail = paged.block_tables[0, 2]
    paged.key_cache[tail, 21 - 16 :] = float("nan")
    paged.value_cache[tail, 21 - 16 :] = float("nan")
    paged.block_tables[0, 3:] = 2**31 - 1
    assert torch.equal(attend(query, *paged.args, 0.25), before)


def test_decode_reaches_past_int32_offsets(device):
    cache = far_apart((3, 8, 2, 16), torch.float16, device)
    tables = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([6], dtype=torch.int32, device=device)
    query = torch.randn(1, 2, 16, dtype=torch.float16, device=device)
    args = query, cache[:, :4], cache[:, 4:], tables, seq_lens, 0.25
    assert_close(paged_attention_decode(*args), reference.paged_attention_decode(*args))


def test_decode_names_what_does_not_fit(device):
    paged = make_paged([5, 5], 2, 16, 8, torch.float32, device)
    keys, values, tables, lens = paged.args
    query = torch.randn(2, 4, 16, device=device)
    with pytest.raises(ValueError, match="query has 3 heads; it must be a multiple of 2"):
        paged_attention_decode(query[:, :3], keys, values, tables, lens, 1.0)
    with pytest.raises(ValueError, match=r"block_tables has dtype torch\.int64"):
        paged_attention_decode(query, keys, values, tables.long(), lens, 1.0)
    with pytest.raises(ValueError, match=r"seq_lens has shape \(1,\)"):
        paged_attention_decode(query, keys, values, tables, lens[:1], 1.0)
    with pytest.raises(ValueError, match="block_tables has 2 rows, required are 1"):
        paged_attention_decode(query[:1], keys, values, tables, lens, 1.0)
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        paged_attention_decode(query, *paged.args, 1.0, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0\.0; it must be above 0"):
        paged_attention_decode(query, *paged.args, 1.0, softcap=0.0)
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); it must be \(4,\)"):
        paged_attention_decode(query, *paged.args, 1.0, sinks=torch.zeros(3, device=device))

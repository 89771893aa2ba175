"""Storing in C: the bits of the twin, in plain caches and in quantized ones."""

import pytest
import torch

from kernels import PAD_SLOT, reference
from kernels.ops import store_kv
from tests.kernels.tensors import far_apart, strided

FORMATS = [None, torch.int8, torch.float8_e4m3fn]

every_format = pytest.mark.parametrize("stored", FORMATS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Blocks:
    """One layer of a block-major pool, filled with 0xA5. As in the worker's pool, the scales of
    keys lie behind the keys, and those of values behind the values.
    """

    def __init__(self, num_blocks, block_size, num_kv_heads, head_dim, dtype, stored):
        slots, numbers_dtype = (block_size, num_kv_heads), stored or dtype
        numbers_bytes = block_size * num_kv_heads * head_dim * numbers_dtype.itemsize
        scales_start = -(-numbers_bytes // 16) * 16
        scales_bytes = 2 * block_size * num_kv_heads
        side_bytes = -(-(scales_start + scales_bytes) // 16) * 16
        self.bytes = torch.full((num_blocks, 3, 2, side_bytes), 0xA5, dtype=torch.uint8)
        self.caches, self.scales = [], []
        for side in range(2):
            of_side = self.bytes[:, 1, side]
            numbers = of_side[:, :numbers_bytes].view(numbers_dtype)
            self.caches.append(numbers.view(num_blocks, *slots, head_dim))
            scales = of_side[:, scales_start : scales_start + scales_bytes].view(torch.bfloat16)
            self.scales.append(None if stored is None else scales.view(num_blocks, *slots))

    def store(self, run, key, value, slots):
        key_scales, value_scales = self.scales
        run(key, value, *self.caches, slots, key_scales=key_scales, value_scales=value_scales)


def assert_stores_as_the_twin(key, value, stored, block_size=5):
    num_tokens, num_kv_heads, head_dim = key.shape
    num_blocks = -(-num_tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[1::3] = PAD_SLOT
    ours, twin = (
        Blocks(num_blocks, block_size, num_kv_heads, head_dim, key.dtype, stored) for _ in range(2)
    )
    ours.store(store_kv, key, value, slots)
    twin.store(reference.store_kv, key, value, slots)
    assert torch.equal(ours.bytes, twin.bytes)


@every_format
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 3, 40), (29, 2, 64), (5, 3, 7), (300, 4, 64)])
def test_it_writes_the_twin_s_bits_and_nothing_else(shape, dtype, stored):
    sizes = torch.linspace(-12, 12, shape[0]).exp2().view(-1, 1, 1).to(dtype)
    key, value = (strided(shape, dtype, "cpu") * sizes for _ in range(2))
    key[0, 0] = 0
    value[-1, -1] = -0.0
    assert_stores_as_the_twin(key, value, stored)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@every_format
def test_tokens_are_shared_out_over_threads(stored, num_threads):
    key, value = (strided((700, 2, 64), torch.bfloat16, "cpu") for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert_stores_as_the_twin(key, value, stored)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("stored", FORMATS[1:], ids=str)
@every_dtype
def test_rows_of_any_bits_are_stored_as_the_twin_stores_them(dtype, stored):
    """Infinities, NaNs and subnormal numbers are among them."""
    bits = torch.randint(2**16, (500, 3, 33)) << 16
    bits |= torch.randint(2**16, bits.shape) if dtype is torch.float32 else 0
    x = (bits - 2**31).to(torch.int32).view(torch.float32)
    x[::2] = x[::2].where(x[::2].isfinite(), 1e-40)
    x[::10] = 1e-39 * torch.rand(50, 3, 33)
    x[1, 0], x[1, 1] = torch.finfo(torch.float32).max, torch.finfo(dtype).tiny
    x[3, 0, 5], x[3, 1, 6], x[3, 2, 32] = torch.inf, -torch.inf, torch.nan
    assert_stores_as_the_twin(x.to(dtype), -x.to(dtype), stored)


@pytest.mark.parametrize("stored", FORMATS[1:], ids=str)
def test_a_row_that_is_not_finite_has_an_infinite_scale(stored):
    key = torch.randn(3, 1, 20)
    key[0, 0, 7], key[1, 0, 19], key[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    blocks = Blocks(1, 4, 1, 20, torch.float32, stored)
    blocks.store(store_kv, key, -key, torch.arange(3))
    for cache, scales in zip(blocks.caches, blocks.scales, strict=True):
        assert (scales[0, :3] == torch.inf).all()
        assert not (cache[0, :3].float() * scales[0, :3, :, None]).isfinite().any()


def test_each_side_has_a_format_of_its_own():
    key, value = (torch.randn(4, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    slots, outs = torch.tensor([3, 0, PAD_SLOT, 6]), []
    for run in (store_kv, reference.store_kv):
        keys = Blocks(2, 4, 2, 16, torch.bfloat16, torch.int8)
        values = Blocks(2, 4, 2, 16, torch.bfloat16, torch.float8_e4m3fn)
        scales = {"key_scales": keys.scales[0], "value_scales": values.scales[1]}
        run(key, value, keys.caches[0], values.caches[1], slots, **scales)
        outs.append((keys.bytes, values.bytes))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours, theirs)


def test_it_reaches_past_int32_offsets():
    cache = far_apart((3, 8, 2, 16), torch.bfloat16, "cpu")
    key = torch.randn(1, 2, 16, dtype=torch.bfloat16)
    store_kv(key, key, cache[:, :4], cache[:, 4:], torch.tensor([11]))
    assert torch.equal(cache[2, 3], key[0])
    assert torch.equal(cache[2, 7], key[0])


def test_a_mismatch_is_refused_by_name():
    key, slots = torch.randn(2, 4, 16), torch.tensor([0, 1])
    cache = torch.zeros(3, 4, 2, 16)
    with pytest.raises(ValueError, match=r"key_cache has shape \(3, 4, 2, 16\)"):
        store_kv(key, key, cache, cache, slots)
    numbers = torch.zeros(3, 4, 4, 16, dtype=torch.int8)
    scales = torch.zeros(3, 4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="value_scales is None, required are both or neither"):
        store_kv(key, key, numbers, numbers, slots, key_scales=scales)
    with pytest.raises(ValueError, match=r"key_scales has dtype torch\.float32"):
        store_kv(key, key, numbers, numbers, slots, key_scales=scales.float(), value_scales=scales)


@every_format
@every_dtype
def test_keys_alone_leave_the_values_bytes_as_they_are(dtype, stored):
    key, slots = strided((7, 1, 28), dtype, "cpu"), torch.tensor([3, PAD_SLOT, 0, 9, 8, 7, 11])
    alone, both, empty = (Blocks(3, 5, 1, 28, dtype, stored) for _ in range(3))
    store_kv(key, None, alone.caches[0], None, slots, key_scales=alone.scales[0])
    both.store(reference.store_kv, key, key, slots)
    assert torch.equal(alone.bytes[:, 1, 0], both.bytes[:, 1, 0])
    assert torch.equal(alone.bytes[:, 1, 1], empty.bytes[:, 1, 1])
    twin = Blocks(3, 5, 1, 28, dtype, stored)
    reference.store_kv(key, None, twin.caches[0], None, slots, key_scales=twin.scales[0])
    assert torch.equal(alone.bytes, twin.bytes)


def test_values_without_a_cache_are_refused():
    key, blocks = torch.randn(2, 1, 16), Blocks(2, 4, 1, 16, torch.float32, None)
    with pytest.raises(ValueError, match="value_cache is None, required are both or neither"):
        store_kv(key, key, blocks.caches[0], None, torch.zeros(2, dtype=torch.int64))

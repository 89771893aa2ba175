import pytest
import torch

from kernels import PAD_SLOT, reference
from kernels.triton.rotary import rotary
from kernels.triton.rotary_store import rotary_store_kv
from kernels.triton.store import store_kv
from tests.kernels.tensors import make_paged, make_quantized, strided
from tests.kernels.test_rotary import table
from tests.kernels.tolerance import assert_close, every_dtype

SHAPES = [
    (1, 1, 2, 2, 3),
    (6, 2, 40, 40, 5),
    (5, 5, 96, 96, 16),
    (6, 2, 40, 30, 5),
]  # H, HKV, D, R, P


def make(stored, num_kv_heads, head_dim, block_size, dtype, device):
    if stored is None:
        return make_paged([30], num_kv_heads, head_dim, block_size, dtype, device)
    return make_quantized([30], num_kv_heads, head_dim, block_size, stored, device)


def copy_of(paged):
    views = (paged.key_cache, paged.value_cache, paged.key_scales, paged.value_scales)
    keys, values, *scales = (None if view is None else view.clone() for view in views)
    return type(paged)(keys, values, paged.block_tables, paged.seq_lens, *scales)


def contents(paged):
    views = (paged.key_cache, paged.value_cache, paged.key_scales, paged.value_scales)
    return [view.contiguous().view(torch.uint8) for view in views if view is not None]


@every_dtype
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotated", "block_size"), SHAPES)
def test_it_is_rotary_and_then_store(
    num_heads, num_kv_heads, head_dim, rotated, block_size, stored, dtype, device
):
    paged = make(stored, num_kv_heads, head_dim, block_size, dtype, device)
    apart, twin = copy_of(paged), copy_of(paged)
    query = strided((7, num_heads, head_dim), dtype, device)
    key, value = (strided((7, num_kv_heads, head_dim), dtype, device) for _ in range(2))
    rows = table(300, rotated, device), torch.randint(0, 300, (7,), device=device)
    slots = torch.randperm(30)[:7].to(device)
    slots[2] = PAD_SLOT

    def fused(run, into):
        caches = into.key_cache, into.value_cache
        return run(query, key, value, *rows, *caches, slots, **into.scales)

    out = fused(rotary_store_kv, paged)
    rotated, rotated_key = rotary(query, key, *rows)
    store_kv(rotated_key, value, apart.key_cache, apart.value_cache, slots, **apart.scales)
    assert torch.equal(out, rotated)
    for ours, theirs in zip(contents(paged), contents(apart), strict=True):
        assert torch.equal(ours, theirs)
    assert_close(fused(reference.rotary_store_kv, twin), rotated)
    if stored is None:
        assert_close(paged.key_cache, twin.key_cache)
        assert torch.equal(paged.value_cache, twin.value_cache)


def test_a_mismatch_is_refused_by_name(device):
    paged = make_paged([9], 2, 16, 4, torch.float32, device)
    query, key = torch.zeros(3, 4, 16, device=device), torch.zeros(3, 2, 16, device=device)
    rows = table(9, 16, device), torch.arange(3, device=device)
    caches = paged.key_cache, paged.value_cache
    slots = torch.arange(3, device=device)
    with pytest.raises(ValueError, match=r"value has shape \(2, 2, 16\)"):
        rotary_store_kv(query, key, key[:2], *rows, *caches, slots)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \(3,\); it must be \(2,\)"):
        rotary_store_kv(query[:2], key[:2], key[:2], rows[0], rows[1][:2], *caches, slots)

import pytest
import torch

from kernels import PAD_SLOT, reference
from kernels.triton.store import store_kv
from tests.kernels.tensors import far_apart, strided
from tests.kernels.tolerance import every_dtype


def caches(num_blocks, block_size, num_kv_heads, head_dim, dtype, device):
    pool = torch.zeros(num_blocks, 2, 2, block_size, num_kv_heads, head_dim, dtype=dtype)
    pool = pool.to(device)
    return pool, pool[:, 1, 0], pool[:, 1, 1]


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 3, 40), (5, 2, 64)])
def test_store_writes_what_the_twin_writes(shape, dtype, device):
    num_tokens, num_kv_heads, head_dim = shape
    key, value = strided(shape, dtype, device), strided(shape, dtype, device)
    slots = torch.randperm(6 * 5)[:num_tokens].to(device)
    pool, *views = caches(6, 5, num_kv_heads, head_dim, dtype, device)
    twin_pool, *twin_views = caches(6, 5, num_kv_heads, head_dim, dtype, device)
    store_kv(key, value, *views, slots)
    reference.store_kv(key, value, *twin_views, slots)
    assert torch.equal(pool, twin_pool)
    assert pool.count_nonzero() == key.count_nonzero() + value.count_nonzero()


@pytest.mark.parametrize("store", [store_kv, reference.store_kv])
def test_padding_slots_are_skipped_and_the_others_land_in_their_slot(store, device):
    key = torch.randn(3, 2, 16, device=device)
    pool, key_cache, value_cache = caches(3, 4, 2, 16, torch.float32, device)
    store(key, -key, key_cache, value_cache, torch.tensor([9, PAD_SLOT, 3], device=device))
    assert torch.equal(key_cache[2, 1], key[0])
    assert torch.equal(value_cache[0, 3], -key[2])
    assert pool.count_nonzero() == 4 * 2 * 16


@pytest.mark.parametrize("store", [store_kv, reference.store_kv])
def test_keys_may_be_stored_alone(store, device):
    key = torch.randn(3, 1, 28, device=device)
    pool, key_cache, _ = caches(3, 4, 1, 28, torch.float32, device)
    store(key, None, key_cache, None, torch.tensor([9, PAD_SLOT, 3], device=device))
    assert torch.equal(key_cache[2, 1], key[0])
    assert torch.equal(key_cache[0, 3], key[2])
    assert pool.count_nonzero() == 2 * 28


@pytest.mark.parametrize("store", [store_kv, reference.store_kv])
def test_only_padding_writes_nothing(store, device):
    key = torch.randn(2, 1, 16, device=device)
    pool, *views = caches(2, 4, 1, 16, torch.float32, device)
    store(key, key, *views, torch.full((2,), PAD_SLOT, device=device))
    assert pool.count_nonzero() == 0


def test_store_reaches_past_int32_offsets(device):
    cache = far_apart((3, 4, 2, 16), torch.float16, device)
    key = torch.randn(1, 2, 16, dtype=torch.float16, device=device)
    key_cache, value_cache = cache[:, :2], cache[:, 2:]
    store_kv(key, -key, key_cache, value_cache, torch.tensor([2 * 2 + 1], device=device))
    assert torch.equal(cache[2, 1], key[0])
    assert torch.equal(cache[2, 3], -key[0])


def test_store_names_the_tensor_that_does_not_fit(device):
    key = torch.randn(2, 1, 16, device=device)
    _, *views = caches(2, 4, 1, 16, torch.float32, device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"slot_mapping has dtype torch\.int32"):
        store_kv(key, key, *views, slots.int())
    with pytest.raises(ValueError, match=r"value has shape \(2, 1, 15\)"):
        store_kv(key, key[..., :15], *views, slots)
    with pytest.raises(ValueError, match="key has last stride 2"):
        store_kv(torch.randn(2, 1, 32, device=device)[..., ::2], key, *views, slots)
    with pytest.raises(ValueError, match=r"key_cache has dtype torch\.float32"):
        store_kv(key.half(), key.half(), *views, slots)

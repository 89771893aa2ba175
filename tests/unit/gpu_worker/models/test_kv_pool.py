"""How the pool's memory is laid out."""

import torch

from gpu_worker.kv_layout import block_bytes
from gpu_worker.kv_pool import KvPool
from gpu_worker.model_source import open_model
from tests.unit.gpu_worker.models.paged_loop import CPU


def make_pool(model_dirs, num_blocks=6, block_size=8, dtype=torch.float32):
    return KvPool(open_model(model_dirs.get("qwen3")).config, num_blocks, block_size, dtype, CPU)


def test_block_bytes(model_dirs):
    config = open_model(model_dirs.get("qwen3")).config  # 2 layers, 2 kv heads of 24
    assert block_bytes(config, 16, torch.bfloat16) == 2 * 2 * 16 * 2 * 24 * 2
    assert make_pool(model_dirs, block_size=16, dtype=torch.bfloat16).block_bytes == 6144


def test_a_block_is_contiguous_and_holds_each_layers_keys_then_values(model_dirs):
    pool = make_pool(model_dirs)
    start = pool.key_cache(0).data_ptr()
    side_bytes = 8 * 2 * 24 * 4
    for layer in range(2):
        key, value = pool.key_cache(layer), pool.value_cache(layer)
        assert key.shape == value.shape == (6, 8, 2, 24)
        assert key[3].is_contiguous()
        offset = 3 * pool.block_bytes + layer * 2 * side_bytes
        assert key[3].data_ptr() == start + offset
        assert value[3].data_ptr() == start + offset + side_bytes


def test_copy_moves_all_layers_and_reads_before_it_writes(model_dirs):
    pool = make_pool(model_dirs)
    for layer in range(2):
        for block in range(6):
            pool.key_cache(layer)[block] = 100 * layer + block
            pool.value_cache(layer)[block] = -100 * layer - block
    pool.copy(torch.tensor([0, 1, 4]), torch.tensor([1, 0, 5]))
    expected = [1, 0, 2, 3, 4, 4]
    for layer in range(2):
        assert pool.key_cache(layer)[:, 0, 0, 0].tolist() == [100 * layer + b for b in expected]
        assert pool.value_cache(layer)[:, 7, 1, 23].tolist() == [-100 * layer - b for b in expected]

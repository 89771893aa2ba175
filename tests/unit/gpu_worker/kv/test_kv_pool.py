"""The layout of the pool's memory."""

from dataclasses import replace

import pytest
import torch

from gpu_worker.kv.device_pool import KvPool
from gpu_worker.kv.layout import block_bytes
from gpu_worker.memory.elastic import ElasticMemory
from gpu_worker.models.registry import open_model
from tests.unit.gpu_worker.fake_cuda_driver import Budget, FakeCudaDriver, HostChunks
from tests.unit.gpu_worker.models.paged_loop import CPU, PagedLoop, Sequence, load, random_prompt


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


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("head_dim", "ratio"), [(32, 34 / 64), (64, 66 / 128), (128, 130 / 256)])
def test_quantized_blocks_are_half_of_bfloat16(model_dirs, head_dim, ratio, stored):
    config = replace(open_model(model_dirs.get("qwen3")).config, head_dim=head_dim)
    plain = block_bytes(config, 16, torch.bfloat16)
    assert block_bytes(config, 16, stored) == ratio * plain


def test_quantized_layers_have_scales_after_their_numbers(model_dirs):
    pool = make_pool(model_dirs, block_size=3, dtype=(torch.int8, torch.float32))
    start = pool.key_cache(0).data_ptr()
    numbers_bytes, scales_bytes = 3 * 2 * 24, 16  # of which 12 are scales
    for block in (0, 5):
        at = start + block * pool.block_bytes
        for cache, scales in (
            (pool.key_cache(0), pool.key_scales(0)),
            (pool.value_cache(0), pool.value_scales(0)),
        ):
            assert (cache.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
            assert (cache.shape, scales.shape) == ((6, 3, 2, 24), (6, 3, 2))
            assert cache[block].is_contiguous()
            assert scales[block].is_contiguous()
            assert cache[block].data_ptr() == at
            assert scales[block].data_ptr() == at + numbers_bytes
            at += numbers_bytes + scales_bytes
        assert pool.key_cache(1)[block].data_ptr() == at
        at += 2 * 3 * 2 * 24 * 4
        assert at == start + (block + 1) * pool.block_bytes
    assert pool.key_cache(1).dtype == torch.float32
    assert pool.key_scales(1) is None
    assert pool.value_scales(1) is None


def test_dtypes_for_another_number_of_layers_are_refused(model_dirs):
    with pytest.raises(ValueError, match="dtypes has 3 entries; there are 2 layers"):
        make_pool(model_dirs, dtype=(torch.int8,) * 3)


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


def test_sequences_go_on_in_a_pool_that_is_resized(model_dirs):
    """The remaining blocks do not move, so all views of them stay valid."""
    model = load(model_dirs.get("qwen3"))
    alone, loop = PagedLoop(model, 4, 16), PagedLoop(model, 4, 16)
    size = loop.pool.block_bytes
    chunks = HostChunks(FakeCudaDriver(Budget(40 * size)), 40 * size)
    memory = ElasticMemory(chunks, 16 * size)
    loop.pool = KvPool(model.config, 16, 4, torch.float32, CPU, memory)
    expected, live = (Sequence(random_prompt(9, seed=1)) for _ in range(2))
    alone.generate([expected], 8)
    keys = loop.pool.key_cache(0)
    loop.generate([live], 3)
    loop.pool.resize(40)
    loop._free_blocks = list(range(30, 40))
    loop.generate([Sequence(random_prompt(9, seed)) for seed in (2, 3)], 3)
    loop.pool.resize(16)
    live.block_table += [block for block in range(16) if block not in live.block_table][:2]
    with torch.inference_mode():
        while len(live.output) < 8:
            loop._step([live], 16)
    assert live.output == expected.output
    assert loop.pool.key_cache(0).data_ptr() == keys.data_ptr()

"""Whether a worker's pool can be resized, its limit, and the errors."""

import pytest
import torch
from fake_cuda_driver import Budget, FakeCudaDriver, HostChunks

from gpu_worker.loading import kv_memory
from gpu_worker.loading.kv_memory import open_pool_memory
from gpu_worker.memory.elastic import VirtualMemoryError
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1024**3
BLOCK_BYTES = 1024**2


def settings(**changes):
    return WorkerSettings(_env_file=None, model="somewhere", **changes)


def test_a_pool_can_be_grown_to_what_the_device_has(monkeypatch):
    monkeypatch.setattr(kv_memory, "device_total_bytes", lambda _: GIB)
    assert len(open_pool_memory(settings(), 4, BLOCK_BYTES, CPU).bytes) == GIB


def test_a_cpu_that_counts_addresses_as_memory_has_a_pool_of_a_fixed_size(monkeypatch):
    monkeypatch.setattr(kv_memory, "device_total_bytes", lambda _: 2**62)
    assert open_pool_memory(settings(), 4, 2**40, CPU) is None


def test_a_pool_can_be_grown_to_what_the_operator_says():
    opened = open_pool_memory(settings(max_kv_memory_gb=0.5), 4, BLOCK_BYTES, CPU)
    assert (opened.num_bytes, len(opened.bytes)) == (4 * BLOCK_BYTES, GIB // 2)


def test_a_scheduler_takes_no_more_blocks_than_so_many():
    opened = open_pool_memory(settings(max_kv_memory_gb=4.0), 4, 64, CPU)
    assert len(opened.bytes) == 2**24 * 64


@pytest.mark.parametrize(
    "changes",
    [
        {"max_kv_memory_gb": 0},
        {"tensor_parallel_size": 2},
        {"speculative": "draft", "draft_model": "small"},
    ],
    ids=str,
)
def test_a_pool_whose_size_is_fixed(changes):
    assert open_pool_memory(settings(**changes), 4, BLOCK_BYTES, CPU) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tensor_parallel_size": 2}, "must be 0 with tensor_parallel_size"),
        ({"speculative": "draft", "draft_model": "small"}, "must be 0 with draft_model"),
    ],
    ids=str,
)
def test_impossible_resizes_are_refused_by_name(changes, why):
    with pytest.raises(ValueError, match=f"max_kv_memory_gb is 2.0; it {why}"):
        settings(max_kv_memory_gb=2, **changes)


def test_the_most_is_no_less_than_what_there_is_at_first():
    with pytest.raises(ModelError, match=r"max-kv-memory-gb is 0.001; .* has 0.004 GiB at first"):
        open_pool_memory(settings(max_kv_memory_gb=0.001), 4, BLOCK_BYTES, CPU)


def test_a_gpus_pool_has_a_fixed_size_unless_it_is_asked_for():
    assert open_pool_memory(settings(), 4, BLOCK_BYTES, CUDA) is None


def test_a_missing_feature_for_resizing_on_a_gpu_is_named(monkeypatch):
    def load_driver():
        raise VirtualMemoryError("it needs the package cuda-bindings")

    monkeypatch.setattr(kv_memory, "load_driver", load_driver)
    with pytest.raises(ModelError, match=r"max-kv-memory-gb is 1.0: it needs the package"):
        open_pool_memory(settings(max_kv_memory_gb=1), 4, BLOCK_BYTES, CUDA)


def test_a_gpus_pool_is_mapped_by_its_driver(monkeypatch):
    budget = Budget(GIB)
    driver = FakeCudaDriver(budget)
    monkeypatch.setattr(kv_memory, "load_driver", lambda: driver)
    monkeypatch.setattr(kv_memory, "CudaChunks", lambda it, _, size: HostChunks(it, size))
    opened = open_pool_memory(settings(max_kv_memory_gb=0.01), 4, BLOCK_BYTES, CUDA)
    assert budget.used_bytes == opened.num_bytes == 4 * BLOCK_BYTES

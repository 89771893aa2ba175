"""Resizable pools: which workers have one, its limit, and the errors."""

import pytest
import torch
from fake_cuda_driver import Budget, FakeCudaDriver, HostChunks

from contract.worker_limits import Limits
from gpu_worker.loading import kv_memory
from gpu_worker.loading.kv_memory import NoRoomError, check_size, open_pool_memory
from gpu_worker.memory.elastic import VirtualMemoryError
from gpu_worker.models.registry import open_model
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError
from tests.models_fixture import make_model

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
    with pytest.raises(ModelError, match=r"max-kv-memory-gb is 0.001; .* starts with 0.004 GiB"):
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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_blocks": 4097}, "num-blocks is 4097, 4.0 GiB of KV memory; cpu has 4.0 GiB in all"),
        ({"kv_cache_memory_gb": 5}, "kv-cache-memory-gb is 5, 5.0 GiB of KV memory; cpu has 4.0"),
    ],
    ids=str,
)
def test_pool_larger_than_the_device_is_refused_with_both_sizes(changes, problem, monkeypatch):
    monkeypatch.setattr(kv_memory, "device_total_bytes", lambda _: 4 * GIB)
    with pytest.raises(NoRoomError, match=problem):
        check_size(settings(**changes), BLOCK_BYTES, CPU)
    check_size(settings(num_blocks=4096), BLOCK_BYTES, CPU)
    check_size(settings(), BLOCK_BYTES, CPU)


class FakeMemory:
    """Stands in for `torch.cuda`: the memory of torch, and of the driver for each graph."""

    def __init__(self, monkeypatch, bytes_of_graph):
        self.bytes_of_graph = bytes_of_graph
        self.num_graphs = 0
        self.once = 0
        self.peak = 0
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "reset_peak_memory_stats",
            "mem_get_info",
            "memory_reserved",
            "empty_cache",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name, lambda *_: 0))
        monkeypatch.setattr(kv_memory, "CudaGraphs", lambda _: self)

    def max_memory_allocated(self, _):
        return 5000

    def memory_reserved(self, _):
        return 7000

    def mem_get_info(self, _):
        return 100_000 - 7000 - self.once - self.num_graphs * self.bytes_of_graph, 100_000

    def capture(self, compute):
        self.once = 900
        self.num_graphs += 1

        def between(_):
            self.num_graphs += 1

        compute(between)
        return lambda: None

    def alias(self, tensor):
        return tensor


def test_graphs_take_torch_s_memory_once_and_the_driver_s_for_each_size(monkeypatch, tmp_path):
    source = open_model(make_model(tmp_path / "model", "qwen2"))  # 3 layers: 4 pieces
    limits = Limits(
        max_num_seqs=4,  # graphs of 1, 2 and 4 rows
        max_model_len=64,
        max_num_batched_tokens=32,  # pieces of 8, 16 and 32 tokens
        num_blocks=0,
        block_size=4,
        vocab_size=500,
    )
    model = source.load(torch.float32, CPU, lambda _: None)
    memory = FakeMemory(monkeypatch, bytes_of_graph=10)
    found = kv_memory.graph_bytes(model, source.config, limits, torch.float32, CPU)
    assert found == 5000 + 6 * 4 * 10
    assert memory.num_graphs == 2 * 4, "two sizes are captured: the first pays 900 once"
    monkeypatch.setattr(memory, "capture", None)  # a model that cannot be captured
    assert kv_memory.graph_bytes(model, source.config, limits, torch.float32, CPU) == 5000


class Ranks:
    """This rank and another one, which captures or not."""

    def __init__(self, *, captures):
        self.captures = captures

    def least(self, value):
        return [min(value, self.captures)]


def test_ranks_measure_graphs_alike_and_none_goes_on_alone(monkeypatch, tmp_path):
    source = open_model(make_model(tmp_path / "model", "qwen2"))
    limits = Limits(4, 64, 32, 0, 4, 500)
    model = source.load(torch.float32, CPU, lambda _: None)
    given = model, source.config, limits, torch.float32, CPU
    memory = FakeMemory(monkeypatch, bytes_of_graph=10)
    assert kv_memory.graph_bytes(*given, Ranks(captures=True)) == 5000 + 6 * 4 * 10
    memory.num_graphs = 0
    assert kv_memory.graph_bytes(*given, Ranks(captures=False)) == 5000
    assert memory.num_graphs == 4, "no second size: the other rank runs none"

    def fail(_):
        raise torch.OutOfMemoryError("in this rank alone")

    monkeypatch.setattr(kv_memory.PiecewiseGraphs, "rehearse", fail)
    with pytest.raises(torch.OutOfMemoryError):
        kv_memory.graph_bytes(*given, Ranks(captures=True))
    assert kv_memory.graph_bytes(*given) == 5000 + 6 * 4 * 10, "one rank alone tries the captures"

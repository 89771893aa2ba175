"""Linear maps fetch the keys and values of the attention after them, each once."""

import ctypes
import itertools
import shutil
import subprocess
from collections import Counter

import pytest
import torch

from kernels.cpu.build import SOURCES
from kernels.cpu.library import KernelCall, native
from kernels.cpu.program.kv_ahead import MAX_RUNS, PANEL, RUN_STEPS, share_out

pytestmark = pytest.mark.skipif(native() is None, reason="needs native code")

LAYERS, BLOCKS, HEAD_DIM = 3, 64, 64
BFLOAT16 = 1


@pytest.fixture(scope="module")
def built(tmp_path_factory, request):
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = request.path.with_name("kv_ahead_runs.c")
    made = tmp_path_factory.mktemp("built") / "runs.so"
    flags = ["-O1", "-march=native", "-std=gnu11", "-fPIC", "-Wno-psabi", "-shared"]
    subprocess.run([compiler, *flags, f"-I{SOURCES}", "-o", made, source, "-lm"], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture
def all_runs(built):
    return built.all_runs


def test_python_and_c_know_the_same_numbers(built):
    numbers = (ctypes.c_int64 * 3).in_dll(built, "constants")
    assert tuple(numbers) == (RUN_STEPS, MAX_RUNS, PANEL)


class Layer:
    """An attention layer's view of a pool, and the sequences of a step."""

    def __init__(self, seq_lens, query_lens=None, *, block_size=16, num_kv_heads=4, window=0):
        pool = torch.zeros(
            BLOCKS, LAYERS, 2, block_size, num_kv_heads, HEAD_DIM, dtype=torch.bfloat16
        )
        self.keys, self.values = pool[:, 1, 0], pool[:, 1, 1]
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.query_starts = None
        if query_lens is not None:
            self.query_starts = torch.tensor([0, *itertools.accumulate(query_lens)]).int()
        width = -(-max(seq_lens) // block_size)
        order = torch.randperm(BLOCKS)[: len(seq_lens) * width]
        self.tables = order.view(len(seq_lens), width).to(torch.int32)
        self.side_bytes = 2 * block_size * num_kv_heads * HEAD_DIM
        self.structure = native().attention.pack(
            BFLOAT16, 0, len(seq_lens), len(seq_lens), num_kv_heads, num_kv_heads, HEAD_DIM,
            HEAD_DIM,
            block_size, window, 0, self.keys.data_ptr(), self.values.data_ptr(), 0, 0,
            self.tables.data_ptr(), self.seq_lens.data_ptr(),
            0 if self.query_starts is None else self.query_starts.data_ptr(), 0, 0, 0, 0, 0,
            *self.keys.stride()[:3], *self.values.stride()[:3], *(0,) * 6,
            self.tables.stride(0), 1.0, 0.0,
        )  # fmt: skip

    def starts(self, blocks_of):
        """The addresses of keys and values of blocks [first, end) of each sequence, in order."""
        starts = []
        for table, (first, end) in zip(self.tables, blocks_of, strict=True):
            for block in table[first:end]:
                starts += [side[block].data_ptr() for side in (self.keys, self.values)]
        return starts


def fetched(all_runs, layer, num_runs, num_after, num_tiles, num_shares=3, count=2):
    """The prefetched runs of all shares, as (address, bytes), without repetitions."""
    runs = []
    found, run_bytes = (ctypes.c_void_p * 4096)(), ctypes.c_int64()
    for share in range(num_shares):
        of_share = all_runs(
            layer.structure, *map(ctypes.c_int64, (num_runs, num_after, num_tiles, share)),
            ctypes.c_int64(num_shares), ctypes.c_int64(count), found, ctypes.byref(run_bytes),
        )  # fmt: skip
        runs += dict.fromkeys((found[i], run_bytes.value) for i in range(of_share))
    return runs


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("num_shares", [1, 2, 7, 256])
def test_a_map_with_room_for_all_fetches_each_side_of_each_block_once(all_runs, num_shares, count):
    layer = Layer([34, 0, 17, 1, 0, 100])
    runs = fetched(all_runs, layer, 1000, 0, 1, num_shares, count)
    blocks = [(0, 3), (0, 0), (0, 1), (0, 0), (0, 0), (0, 7)]
    assert [address for address, _ in runs] == layer.starts(blocks)
    assert {size for _, size in runs} == {layer.side_bytes}


def test_kv_that_a_step_stores_is_not_prefetched(all_runs):
    # A fresh prompt, a later chunk, a decode at a block's first slot, and one at its second.
    layer = Layer([40, 40, 33, 34], [40, 8, 1, 1])
    runs = fetched(all_runs, layer, 1000, 0, 1)
    blocks = [(0, 0), (0, 2), (0, 2), (0, 3)]
    assert [address for address, _ in runs] == layer.starts(blocks)


def test_no_more_is_fetched_than_a_cache_holds(all_runs):
    layer = Layer([16 * BLOCKS], num_kv_heads=128)
    starts = layer.starts([(0, BLOCKS)])
    runs = fetched(all_runs, layer, 100000, 0, 1)
    assert sum(size for _, size in runs) == 16 << 20
    assert runs[-1][0] == starts[-1] + layer.side_bytes - 8192
    assert fetched(all_runs, layer, 100000, len(runs), 1) == []


def test_a_large_block_is_several_runs_that_cover_it(all_runs):
    layer = Layer([70], block_size=64, num_kv_heads=5)
    runs = fetched(all_runs, layer, 1000, 0, 1)
    covered = Counter(byte // 64 for start, size in runs for byte in range(start, start + size, 64))
    expected = {
        byte // 64
        for start in layer.starts([(0, 2)])
        for byte in range(start, start + layer.side_bytes, 64)
    }
    assert set(covered) == expected
    assert set(covered.values()) == {1}
    assert max(size for _, size in runs) <= 8192


def test_blocks_before_a_window_are_not_fetched(all_runs):
    layer = Layer([200, 65], window=40)
    runs = fetched(all_runs, layer, 1000, 0, 1)
    # Attention reads whole tiles of 64 positions; in the first sequence those from 128 on.
    assert [address for address, _ in runs] == layer.starts([(8, 13), (0, 4)])


@pytest.mark.parametrize("num_tiles", [1, 2])
def test_maps_without_room_for_all_fetch_the_end_and_the_last_one_the_last(all_runs, num_tiles):
    layer = Layer([16 * 10 + 1])
    starts = layer.starts([(0, 10)])
    sizes, after = [4, 3, 2], [5, 2, 0]
    of_maps = [
        [address for address, _ in fetched(all_runs, layer, size, behind, num_tiles)]
        for size, behind in zip(sizes, after, strict=True)
    ]
    assert [len(runs) for runs in of_maps] == [
        min(size * num_tiles, len(starts) - behind * num_tiles)
        for size, behind in zip(sizes, after, strict=True)
    ]
    runs = list(itertools.chain.from_iterable(of_maps))
    assert runs == starts[len(starts) - len(runs) :]


def test_nothing_is_fetched_by_a_map_with_one_tile_of_rows(all_runs):
    assert fetched(all_runs, Layer([100]), 1000, 0, 0) == []


def test_nothing_is_fetched_for_an_empty_step(all_runs):
    assert fetched(all_runs, Layer([0, 0, 1]), 1000, 2, 1) == []


def test_the_maps_before_an_attention_share_it_out_from_its_end():
    attention = KernelCall(native().attention, ())
    maps = {"o": (768, 768), "wide": (70000, 32), "down": (2048, 769), "qkv": (896, 32)}
    parts = share_out(attention, maps)
    assert {name: (part.num_runs, part.num_runs_after) for name, part in parts.items()} == {
        "o": (24 * 3, 25 * 8 + 3),
        "wide": (0, 25 * 8 + 3),
        "down": (25 * 8, 3),
        "qkv": (3, 0),
    }
    assert all(part.attention is attention for part in parts.values())

import pytest
import torch

from kernels import reference
from kernels.triton.copy import copy_blocks, gather_blocks, scatter_blocks
from tests.kernels.tensors import far_apart

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_elems", [1, 7, 4096, 10_000])
def test_copy_moves_what_the_twin_moves(block_elems, dtype, device):
    pool = torch.randint(0, 200, (9, block_elems), device=device).to(dtype)
    twin_pool = pool.clone()
    src, dst = torch.tensor([[0, 8, 3], [5, 1, 7]], device=device)
    copy_blocks(pool, src, dst)
    reference.copy_blocks(twin_pool, src, dst)
    assert torch.equal(pool, twin_pool)


@pytest.mark.parametrize("copy", [copy_blocks, reference.copy_blocks])
def test_all_reads_happen_before_any_write(copy, device):
    pool = torch.arange(5, device=device).repeat_interleave(3).view(5, 3)
    src, dst = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]], device=device)
    copy(pool, src, dst)
    assert pool[:, 0].tolist() == [3, 0, 1, 2, 4]


def test_a_pool_cut_out_of_a_wider_one(device):
    wide = torch.randint(0, 100, (4, 11), device=device, dtype=torch.int16)
    before = wide.clone()
    copy_blocks(wide[:, 2:9], torch.tensor([1], device=device), torch.tensor([3], device=device))
    before[3, 2:9] = before[1, 2:9]
    assert torch.equal(wide, before)


def test_no_copies_change_nothing(device):
    pool = torch.ones(2, 3, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    copy_blocks(pool, none, none)
    assert torch.equal(pool, torch.ones(2, 3, device=device))


def test_copy_reaches_past_int32_offsets(device):
    pool = far_apart((3, 37), torch.float16, device)
    old = pool.clone()
    src, dst = torch.tensor([[2, 0], [0, 2]], device=device)
    copy_blocks(pool, src, dst)
    assert torch.equal(pool, old[[2, 1, 0]])


def test_copy_names_the_tensor_that_does_not_fit(device):
    pool = torch.zeros(4, 8, device=device)
    ids = torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match=r"dst has shape \(1,\); it must be \(2,\)"):
        copy_blocks(pool, ids, ids[:1])
    with pytest.raises(ValueError, match=r"src has dtype torch\.int32"):
        copy_blocks(pool, ids.int(), ids)


def block_major(pool):
    return pool


def layer_major(pool):
    """The same blocks [B, K, E] in layer-major order."""
    return pool.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("arrange", [block_major, layer_major])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece_elems", [1, 7, 4100])
def test_blocks_are_staged_and_come_back(piece_elems, dtype, arrange, device):
    pool = torch.randint(0, 200, (9, 3, piece_elems), device=device).to(dtype)
    pool = arrange(pool)
    ids = torch.tensor([7, 0, 1, 4], device=device)
    staged = torch.zeros(4, 3, piece_elems, dtype=dtype, device=device)
    gather_blocks(pool, ids, staged)
    assert torch.equal(staged, pool[ids])
    target, twin = torch.zeros_like(pool), torch.zeros_like(pool)
    scatter_blocks(target, ids, staged)
    reference.scatter_blocks(twin, ids, staged)
    assert torch.equal(target, twin)
    reference.gather_blocks(target, ids, staged.zero_())
    assert torch.equal(staged, pool[ids])


def test_whole_blocks_are_staged_into_a_part_of_a_buffer(device):
    pool = torch.randint(0, 100, (6, 10), dtype=torch.uint8, device=device)
    staging = torch.zeros(5, 12, dtype=torch.uint8, device=device)
    gather_blocks(pool, torch.tensor([5, 2], device=device), staging[1:3, :10])
    assert torch.equal(staging[1:3, :10], pool[[5, 2]])
    assert staging[[0, 3, 4]].count_nonzero() == 0


def test_staging_reaches_past_int32_offsets(device):
    pool = far_apart((3, 37), torch.float16, device)
    staged = torch.empty(1, 37, dtype=torch.float16, device=device)
    gather_blocks(pool, torch.tensor([2], device=device), staged)
    assert torch.equal(staged[0], pool[2])
    scatter_blocks(pool, torch.tensor([2], device=device), -staged)
    assert torch.equal(pool[2], -staged[0])


def test_staging_names_the_tensor_that_does_not_fit(device):
    pool = torch.zeros(4, 8, device=device)
    ids = torch.tensor([1, 2], device=device)
    with pytest.raises(ValueError, match=r"staged has shape \(3, 8\); it must be \(2, 8\)"):
        gather_blocks(pool, ids, torch.zeros(3, 8, device=device))
    with pytest.raises(ValueError, match="pool has 1 dimensions, required are 2 or 3"):
        scatter_blocks(pool[0], ids, pool[0])

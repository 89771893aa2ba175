"""A repeated launch does not look its kernel up again; a fake replaces the kernel."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from kernels import ops
from kernels.sequences import Sequences
from kernels.triton.attention import decode, prefill
from kernels.triton.launch import Launch
from tests.kernels.tensors import make_paged


class FakeKernel:
    """Compiles a variant for each value of `SIZE`, as Triton does for constants."""

    arg_names = ("x", "length", "SIZE")

    def __init__(self):
        self.looked_for = []
        self.launched = []

    def __getitem__(self, grid):
        def run(*, x, length, SIZE, num_warps):  # noqa: N803
            self.looked_for.append(SIZE)
            self.launched.append((SIZE, grid, x, length))
            assert num_warps == 4
            return Compiled(self, SIZE)

        return run


class Compiled:
    def __init__(self, kernel, size):
        self.kernel, self.size = kernel, size

    def __getitem__(self, grid):
        def run(x, length, size):
            assert size == self.size
            self.kernel.launched.append((self.size, grid, x, length))

        return run


def test_each_variant_is_looked_for_once():
    kernel = FakeKernel()
    launch = Launch(kernel, {"x": "tensor"}, {"num_warps": 4})
    for length, size in ((3, 8), (5, 8), (20, 32), (6, 8), (21, 32)):
        launch((length, 1, 1), size, length=length, SIZE=size)
    assert kernel.looked_for == [8, 32]
    assert kernel.launched == [
        (size, (length, 1, 1), "tensor", length)
        for length, size in ((3, 8), (5, 8), (20, 32), (6, 8), (21, 32))
    ]


def test_a_launch_keeps_no_argument_of_a_step():
    class Tensor:
        pass

    launch = Launch(FakeKernel(), {"x": "tensor"}, {"num_warps": 4})
    launch._kernel.launched = Forgetful()
    of_step = Tensor()
    kept = weakref.ref(of_step)
    for _ in range(2):
        launch((1, 1, 1), 8, length=of_step, SIZE=8)
    del of_step
    assert kept() is None


class Forgetful:
    def append(self, _):
        pass


def test_prepared_attention_follows_the_sequences(device):
    """One query and output, launched for some sequences and then for others."""
    first, second = ([5, 9, 1], [2]), ([17], [30, 4])
    scale, out = 0.3, torch.empty(40, 4, 16, device=device)
    query = torch.randn(40, 4, 16, device=device)
    for lens in (first, second):
        paged = make_paged([*lens[0], *lens[1]], 2, 16, 8, torch.float32, device)
        keys, values, tables, seq_lens = paged.args
        num_decodes, chunk_lens = len(lens[0]), [min(2, each) for each in lens[1]]
        starts = torch.tensor([0, *chunk_lens], device=device).cumsum(0).int() + num_decodes
        decodes = Sequences(tables[:num_decodes], seq_lens[:num_decodes])
        chunks = Sequences(tables[num_decodes:], seq_lens[num_decodes:], starts, 2)
        for module in (ops, SimpleNamespace(**vars(decode) | vars(prefill))):
            module.prepare_prefill(query, keys, values, scale, out=out)(chunks)
            prepared = module.prepare_decode(query, keys, values, scale, out=out)
            prepared(decodes)
            room = list(decodes.scratch.values())
            prepared(decodes)
            assert list(map(id, decodes.scratch.values())) == list(map(id, room)), "it is shared"
            num_tokens = num_decodes + sum(chunk_lens)
            if module is ops:
                expected = out[:num_tokens].clone()
            else:
                torch.testing.assert_close(out[:num_tokens], expected)


def test_sequences_are_checked_once():
    tables, lens = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seq_lens has shape \(1,\); it must be \(2,\)"):
        Sequences(tables, lens[:1])
    with pytest.raises(ValueError, match=r"block_tables has dtype torch\.int64"):
        Sequences(tables.long(), lens)
    with pytest.raises(ValueError, match=r"query_start_loc has shape \(2,\); it must be \(3,\)"):
        Sequences(tables, lens, lens)

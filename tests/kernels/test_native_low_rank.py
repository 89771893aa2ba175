"""Adapters added to a map in C, against the same maps one after another."""

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from kernels import ops
from kernels.cpu.library import Program, native
from kernels.cpu.linear import pack
from kernels.cpu.program.low_rank import NativeAdapter, RowAdapters, low_rank_calls
from tests.kernels.late_threads import LateThreads
from tests.kernels.tolerance import assert_close

pytestmark = pytest.mark.skipif(
    native() is None,
    reason="needs native code",
)
BF16 = torch.bfloat16
NAME, PLACE = "gate_up", 2


def random_pair(num_in, num_out, num_ranks):
    """A [R, K] and B [N, R], bfloat16."""
    down = torch.randn(num_ranks, num_in) * num_in**-0.5
    up = torch.randn(num_out, num_ranks) * num_ranks**-0.5
    return down.to(BF16), up.to(BF16)


class Map:
    """A linear map and its adapters: from number 1, each is the matrices A and B, or None."""

    def __init__(self, num_in, num_out, pairs, padding=0):
        self.padding = padding
        self.weight = (torch.randn(num_out, num_in) * num_in**-0.5).to(BF16)
        self.apply = pack(self.weight, None)
        self.pairs = dict(enumerate(pairs, start=1))
        self.packed = {
            number: None
            if pair is None
            else tuple(pack(each, None, is_low_rank=True) for each in pair)
            for number, pair in self.pairs.items()
        }
        self.adapters = {
            number: NativeAdapter([{} if pair is None else {NAME: pair}])
            for number, pair in self.packed.items()
        }

    def native(self, x, numbers, *, is_gated=False):
        """The rows of `x` [T, K], each with what the adapter of its number adds."""
        rows = RowAdapters(np.array(numbers, np.int64), self.adapters)
        num_out = self.apply.num_out
        out, alone = torch.full((2, len(x), num_out + self.padding), torch.nan, dtype=BF16)
        out, alone = out[:, :num_out], alone[:, :num_out]
        ranks = torch.full((len(x), max(rows.max_ranks, 1)), torch.nan, dtype=BF16)
        calls = [
            self.apply.call(x, alone, len(x)),
            *low_rank_calls(
                native(), rows.address, PLACE, x, alone, ranks,
                out[:, : num_out // 2] if is_gated else out, is_gated=is_gated,
            ),
        ]  # fmt: skip
        Program(native(), calls, len(calls))()
        if is_gated:
            assert out[:, num_out // 2 :].isnan().all()
            return out[:, : num_out // 2]
        return out

    def one_by_one(self, x, numbers):
        """The expected bits, from one map after another."""
        out = self.apply(x)
        for row, number in enumerate(numbers):
            if (pair := self.packed.get(number)) is not None:
                down, up = pair
                out[row : row + 1] += up(down(x[row : row + 1]))
        return out

    def twin(self, x, numbers):
        """The definition, in torch."""
        rows = []
        for row, number in zip(x, numbers, strict=True):
            y = linear(row.float(), self.weight.float())
            if (pair := self.pairs.get(number)) is not None:
                y += linear(linear(row.float(), pair[0].float()), pair[1].float())
            rows.append(y)
        return torch.stack(rows).to(BF16)


def strided_rows(num_rows, num_in, gap=6):
    return torch.randn(num_rows, num_in + gap).to(BF16)[:, :num_in]


def numbers_of(num_rows, most, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(most + 1, (num_rows,), generator=generator).tolist()


@pytest.fixture(params=[1, 2, 5])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("num_in", "num_out", "ranks"),
    [
        (2, 1, (2,)),
        (63, 70, (4, 34)),
        (64, 70, (4, 16, 34)),
        (768, 96, (48, 2, 64, 16)),
        (2048, 40, (512, 6)),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 13, 31, 100, 193])
def test_rows_of_several_adapters_and_of_none(num_rows, num_in, num_out, ranks):
    pairs = [*(random_pair(num_in, num_out, rank) for rank in ranks), None]
    each = Map(num_in, num_out, pairs, padding=3)
    x, numbers = strided_rows(num_rows, num_in), numbers_of(num_rows, len(pairs))
    out = each.native(x, numbers)
    assert torch.equal(out, each.one_by_one(x, numbers))
    assert_close(out, each.twin(x, numbers))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("num_rows", [1, 13, 100])
def test_gated_it_is_what_silu_mul_makes_of_it(num_rows):
    each = Map(64, 192, [random_pair(64, 192, 16), random_pair(64, 192, 6), None], padding=5)
    x, numbers = torch.randn(num_rows, 64).to(BF16), numbers_of(num_rows, 3)
    out = each.native(x, numbers, is_gated=True)
    assert torch.equal(out, ops.silu_mul(each.native(x, numbers)))


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("num_rows", [1, 9, 120])
def test_all_rows_of_one(num_rows, number):
    each = Map(2048, 64, [random_pair(2048, 64, 16), None])
    x, numbers = torch.randn(num_rows, 2048).to(BF16), [number] * num_rows
    assert torch.equal(each.native(x, numbers), each.one_by_one(x, numbers))


def test_a_row_depends_on_no_other_row():
    pairs = [random_pair(768, 96, rank) for rank in (16, 48)]
    each = Map(768, 96, pairs)
    x, numbers = torch.randn(150, 768).to(BF16), numbers_of(150, 2)
    together = each.native(x, numbers)
    order = torch.randperm(150)
    assert torch.equal(each.native(x[order], [numbers[i] for i in order]), together[order])
    for row in range(0, 150, 7):
        assert torch.equal(each.native(x[row : row + 1], [numbers[row]])[0], together[row])


@pytest.mark.parametrize("num_in", [64, 2048])
@pytest.mark.parametrize("num_rows", [1, 30, 230])
def test_shares_may_be_done_twice_and_late(monkeypatch, num_rows, num_in):
    each = Map(num_in, 1000, [random_pair(num_in, 1000, rank) for rank in (16, 48)])
    x, numbers = torch.randn(num_rows, num_in).to(BF16), numbers_of(num_rows, 2)
    expected = each.native(x, numbers)
    late = LateThreads(seed=num_rows)
    monkeypatch.setattr(native(), "run", late)
    assert torch.equal(each.native(x, numbers), expected)
    assert late.num_redone


def test_maps_that_are_fused_read_their_own_ranks():
    sizes, rank = (64, 32, 40), 3
    down, _ = random_pair(128, 1, 10)
    up = torch.zeros(sum(sizes), 10)
    firsts = np.cumsum([0, *sizes])
    for i in (0, 2):  # the adapter does not change the map between them
        first_rank = 0 if i == 0 else rank
        up[firsts[i] : firsts[i + 1], first_rank : first_rank + rank] = torch.randn(sizes[i], rank)
    each = Map(128, sum(sizes), [(down, up.to(BF16))])
    x, numbers = torch.randn(20, 128).to(BF16), [1] * 20
    out = each.native(x, numbers)
    assert torch.equal(out, each.one_by_one(x, numbers))
    assert torch.equal(out[:, 64:96], each.apply(x)[:, 64:96])


def test_no_rows():
    each = Map(64, 32, [random_pair(64, 32, 4)])
    assert each.native(torch.empty(0, 64, dtype=BF16), []).shape == (0, 32)

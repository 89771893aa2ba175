"""A capture that fails as CUDA's do leaves torch as it was. The fakes stand in for `torch.cuda`."""

import pytest
import torch
from fake_graphs import FakeGraphs

from gpu_worker.loading import rank_model
from gpu_worker.step.graphs.cuda_graphs import CudaGraphs, GraphsOfAll, LostRankError, PiecesError
from tests.fake_captures import DEVICE, FakeCuda


def in_pieces(cuda, *, fails):
    def compute(between):
        cuda.launch("first")
        between(lambda: cuda.log.append("work"))
        cuda.launch("second")
        if fails:
            cuda.synchronize_a_stream()

    return compute


def whole(cuda, *, fails):
    def compute(_):
        cuda.launch("first")
        if fails:
            cuda.synchronize_a_stream()

    return compute


@pytest.mark.parametrize("computation", [whole, in_pieces])
def test_a_failed_capture_leaves_stream_and_allocator_as_they_were(monkeypatch, computation):
    cuda = FakeCuda(monkeypatch)
    graphs = CudaGraphs(DEVICE)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(computation(cuda, fails=True))
    assert cuda.current is cuda.default
    assert cuda.allocates_to == []
    cuda.log.clear()
    graphs.capture(computation(cuda, fails=False))
    assert cuda.current is cuda.default
    assert cuda.allocates_to == []
    assert cuda.log[0] == "first", "it runs once before it is captured"


def test_an_error_of_python_ends_a_capture_too(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    num_calls = iter(range(2))

    def compute(_):
        if next(num_calls):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  any
        CudaGraphs(DEVICE).capture(compute)
    assert cuda.allocates_to == []


def test_a_replay_does_the_work_between_the_pieces(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    replay = CudaGraphs(DEVICE).capture(in_pieces(cuda, fails=False))
    assert cuda.log == ["first", "work", "second"], "the run before"
    cuda.log.clear()
    replay()
    replay()
    assert cuda.log == [0, "work", 1] * 2


def test_an_alias_has_the_address_and_does_not_keep_the_memory(monkeypatch):
    FakeCuda(monkeypatch)
    whole = torch.arange(24).view(4, 6)
    part = whole[1:, ::2]
    alias = CudaGraphs(DEVICE).alias(part)
    assert torch.equal(alias, part)
    assert (alias.data_ptr(), alias.stride()) == (part.data_ptr(), part.stride())
    assert alias.untyped_storage()._cdata != part.untyped_storage()._cdata
    part.fill_(7)
    assert alias.eq(7).all()


class OtherRank:
    """Its ranks are this one and another one, which captures or not."""

    def __init__(self, *, captures):
        self.captures = captures
        self.heard = []

    def least(self, *values):
        self.heard.append(values)
        return [min(value, self.captures) for value in values]


@pytest.mark.parametrize("other_captures", [True, False])
@pytest.mark.parametrize("fails_at", [None, 0])
def test_a_capture_that_fails_in_one_rank_fails_in_all(other_captures, fails_at):
    ranks, own = OtherRank(captures=other_captures), FakeGraphs(fails_at)
    graphs = GraphsOfAll(own, ranks)
    if other_captures and fails_at is None:
        graphs.capture(lambda _: None)()
        assert own.num_replays == 1
    else:
        message = "another rank" if fails_at is None else "not permitted"
        with pytest.raises(RuntimeError, match=message):
            graphs.capture(lambda _: None)
    assert ranks.heard == [(float(fails_at is None),)], "the other rank waits for the answer"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("a bug")])
def test_a_run_that_fails_in_one_rank_ends_it_because_the_others_wait_in_theirs(error):
    ranks = OtherRank(captures=True)

    def compute(_):
        raise error

    with pytest.raises(LostRankError) as raised:
        GraphsOfAll(FakeGraphs(), ranks).capture(compute)
    assert raised.value.__cause__ is error
    assert ranks.heard == [], "the other rank is in its run, and would not answer"


def test_a_model_that_has_no_pieces_has_none_in_any_rank():
    ranks = OtherRank(captures=False)

    def compute(_):
        raise PiecesError

    with pytest.raises(PiecesError):
        GraphsOfAll(FakeGraphs(), ranks).capture(compute)
    assert ranks.heard == [(0.0,)]


def test_a_start_whose_rank_is_lost_ends():
    class Lost:
        def capture_pieces(self, *_):
            raise LostRankError

        capture_decodes = capture_pieces

    with pytest.raises(LostRankError):
        rank_model._capture_graphs(Lost(), None, lambda *_: None)

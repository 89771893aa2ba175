"""An adapter is loaded by all ranks, or by none."""

import json
import queue
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch

from contract.lora import LoraAdapter
from gpu_worker.loading.rank_model import check_same_adapters
from gpu_worker.lora.adapter import Adapter
from gpu_worker.parallel import follower as follower_module
from gpu_worker.parallel.adapter_loading import FollowersLoader, load_on_all_ranks
from gpu_worker.parallel.follower import Follower
from gpu_worker.parallel.leader import Leader
from gpu_worker.parallel.link import Frame, Kind, Link
from gpu_worker.parallel.member import Member
from gpu_worker.settings import WorkerSettings
from model_files.errors import ModelError


def adapter(name="a", digest=b"d" * 32):
    return Adapter(LoraAdapter(name, digest), ())


class Group:
    """Rank 0's leader, and two threads that answer as ranks 1 and 2 do."""

    def __init__(self, *load_own):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        settings = WorkerSettings(
            model="m", device="cpu", tensor_parallel_size=3, local_ranks=1, master_port=port
        )
        self.leader = Leader(settings)
        self.loaders = [FollowersLoader(each) for each in load_own]
        for rank, loader in enumerate(self.loaders, 1):
            link = Link(socket.create_connection(("127.0.0.1", port)))
            link.send(Frame(Kind.HELLO, Member(self.leader.member.settings, rank).hello()))
            threading.Thread(target=self._follow, args=(link, loader), daemon=True).start()
        self.leader.gather(lambda *_: None, {})

    @staticmethod
    def _follow(link, loader):
        while (frame := link.receive()).kind is not Kind.CLOSE:
            if frame.kind is Kind.LOAD_ADAPTER:
                link.send(Frame(Kind.ADAPTER, loader.answer(frame.content)))
        link.close()


@pytest.fixture
def group():
    groups = []

    def make(*load_own):
        groups.append(Group(*load_own))
        return groups[-1]

    yield make
    for each in groups:
        each.leader.close()


def well(name, directory):  # noqa: ARG001 - a loader's arguments
    return adapter(name)


def test_all_ranks_load_the_adapter_that_was_named(group):
    told = []

    def load(name, directory):
        told.append((name, directory))
        return adapter(name)

    two = group(load, load)
    loaded = load_on_all_ranks(two.leader, load)("sql", Path("/adapters/sql"))
    assert told == [("sql", Path("/adapters/sql"))] * 3
    assert [loader.take().id for loader in two.loaders] == [loaded.id] * 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ModelError("no such file"), ModelError), (torch.OutOfMemoryError("full"), MemoryError)],
)
def test_the_error_of_another_rank_is_rank_0s_error(group, error, kind):
    errors = [error]

    def fails_once(name, directory):
        if errors:
            raise errors.pop()
        return well(name, directory)

    two = group(well, fails_once)
    load = load_on_all_ranks(two.leader, well)
    expected = torch.OutOfMemoryError if kind is MemoryError else kind
    with pytest.raises(expected, match=f"rank 2: {error}"):
        load("a", Path("/a"))
    assert load("a", Path("/a")).id == adapter().id, "and the next load is not affected"


def test_ranks_that_read_different_contents_load_nothing(group):
    two = group(well, lambda name, _: adapter(name, b"e" * 32))
    with pytest.raises(ModelError, match="rank 2 has read other contents from /a"):
        load_on_all_ranks(two.leader, well)("a", Path("/a"))


def test_an_error_of_rank_0_leaves_no_answer_to_the_next_load(group):
    errors = [ModelError("damaged")]

    def fails_once(name, directory):
        if errors:
            raise errors.pop()
        return well(name, directory)

    two = group(well, well)
    load = load_on_all_ranks(two.leader, fails_once)
    with pytest.raises(ModelError, match="damaged"):
        load("first", Path("/first"))
    assert load("second", Path("/second")).id.name == "second"
    assert [loader.take().id.name for loader in two.loaders] == ["second"] * 2


def test_only_the_last_adapter_is_kept_until_it_is_added():
    loader = FollowersLoader(well)
    for name in ("first", "second"):
        assert "digest" in json.loads(
            loader.answer(json.dumps({"name": name, "directory": "/"}).encode())
        )
    assert loader.take().id.name == "second"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of `_end`
def test_a_rank_whose_steps_lag_adds_each_adapter_under_its_own_number(monkeypatch):
    monkeypatch.setattr(follower_module, "_end", lambda _: sys.exit())  # ends the thread alone
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Link(socket.create_connection(listener.getsockname()))
        theirs = Link(listener.accept()[0])
    follower = Follower.__new__(Follower)
    follower._link, follower._loader = theirs, FollowersLoader(well)
    follower._frames, follower._loads, follower._added = (queue.SimpleQueue() for _ in range(3))
    reading = threading.Thread(target=follower._read, daemon=True)
    reading.start()
    threading.Thread(target=follower._load, args=(follower._loader,), daemon=True).start()
    for number, name in enumerate("ab", 1):
        wanted = {"name": name, "directory": "/"}
        ours.send(Frame(Kind.LOAD_ADAPTER, json.dumps(wanted).encode()))
        assert ours.receive().kind is Kind.ADAPTER
        ours.send(Frame(Kind.ADD_ADAPTER, str(number).encode()))
    added = [(follower._frames.get().content, follower._added.get().id.name) for _ in "ab"]
    assert added == [(b"1", "a"), (b"2", "b")]
    ours.close()
    reading.join()


def member(rank, *lora):
    settings = WorkerSettings(model="m", device="cpu", tensor_parallel_size=2, lora=lora)
    return Member(settings, rank)


def test_ranks_must_have_adapters_of_the_same_names():
    rank_0 = member(0, "a=/here/a")
    assert rank_0.check(member(1, "a=/there/a").hello()) == 1
    with pytest.raises(ModelError, match=r"lora is \['b'\] at rank 1; it must be \['a'\]"):
        rank_0.check(member(1, "b=/here/a").hello())


class TwoRanks:
    """Collectives of two ranks, of which the other has told `values`."""

    def __init__(self, *values):
        self.values = values
        self.told = ()

    def least(self, *values):
        self.told = values
        return [min(pair) for pair in zip(values, self.values or values, strict=True)]


def test_ranks_must_start_with_adapters_of_the_same_contents():
    alike = {1: adapter("a", b"1" * 32), 2: adapter("b", b"2" * 32)}
    other = TwoRanks()
    check_same_adapters(alike, other)
    check_same_adapters(alike, TwoRanks(*other.told))
    for digest in (b"3" * 32, b"0" * 32):
        with pytest.raises(ModelError, match="files differ between the ranks' machines"):
            check_same_adapters(alike | {2: adapter("b", digest)}, TwoRanks(*other.told))

"""How ranks connect: messages over a link, refused ranks, and contradictory settings."""

import socket
import subprocess
import threading

import pytest
from pydantic import ValidationError

from gpu_worker.parallel.leader import Leader
from gpu_worker.parallel.link import Frame, Kind, Link
from gpu_worker.parallel.member import Member, command, member_from_json
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError


def settings(**changes):
    values = {"model": "some/where", "tensor_parallel_size": 2}
    return WorkerSettings(_env_file=None, **(values | changes))


@pytest.fixture
def links():
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    first, second = Link(ours), Link(theirs)
    yield first, second
    first.close()
    second.close()


def test_frames_arrive_whole_and_in_order(links):
    ours, theirs = links
    frames = [Frame(Kind.LAUNCH, bytes(100_000)), Frame(Kind.COLLECT), Frame(Kind.RESET, b"x")]
    sending = threading.Thread(target=lambda: [ours.send(frame) for frame in frames])
    sending.start()
    assert [theirs.receive() for _ in frames] == frames
    sending.join()


def test_the_end_of_one_end_is_seen_at_the_other(links):
    ours, theirs = links
    ours.close()
    with pytest.raises(ConnectionError, match="the other end has closed the connection"):
        theirs.receive()


def test_a_process_is_told_all_it_must_know():
    member = Member(settings(rank=1, master_port=5, device="cpu", block_size=8), 0)
    told = member_from_json(member.to_json())
    assert told == member
    assert (told.place.rank, told.place.tensor_size) == (1, 2)


def test_ranks_with_other_settings_are_refused_by_name():
    rank_0 = Member(settings())
    assert rank_0.check(Member(settings(), 1).hello()) == 1
    other = Member(settings(block_size=32), 1)
    with pytest.raises(ModelError, match="block-size is 32 at rank 1; it must be 16, as at rank 0"):
        rank_0.check(other.hello())


def hello(leader, rank):
    link = Link(socket.create_connection(("127.0.0.1", leader.member.settings.master_port)))
    link.send(Frame(Kind.HELLO, Member(leader.member.settings, rank).hello()))
    return link


def test_all_ranks_are_welcomed_when_the_last_has_come_and_strangers_are_sent_away(free_port):
    leader = Leader(settings(tensor_parallel_size=3, local_ranks=1, master_port=free_port))
    reports, links = [], []

    def report(status, _):
        reports.append(status)
        if len(links) == 0:
            stranger = socket.create_connection(("127.0.0.1", free_port))
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            links.append(stranger)
        elif len(links) < 3:
            links.append(hello(leader, len(links)))

    leader.gather(report, {"store_port": 7})
    assert reports[0] == "waiting for ranks 1, 2"
    assert reports[-1] == "waiting for ranks 2"
    for link in links[1:]:
        assert link.receive() == Frame(Kind.WELCOME, b'{"store_port": 7}')
    leader.send(Frame(Kind.LAUNCH, b"step"))
    leader.close()
    for link in links[1:]:
        assert [link.receive().kind for _ in range(2)] == [Kind.LAUNCH, Kind.CLOSE]
        link.close()
    links[0].close()


@pytest.fixture
def other_rank():
    """A process of rank 1 that has sent its hello, and our end of its link."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = Member(settings(master_port=listener.getsockname()[1]), 1)
        process = subprocess.Popen(command(), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process.stdin.write(member.to_json() + b"\n")
        process.stdin.flush()
        connected, _ = listener.accept()
    link = Link(connected)
    assert link.receive() == Frame(Kind.HELLO, member.hello())
    yield process, link
    link.close()
    process.stdin.close()
    process.kill()
    process.wait()


def test_a_rank_ends_when_the_process_that_started_it_does(other_rank):
    process, _ = other_rank
    process.stdin.close()
    assert process.wait(20) == 1


def test_a_rank_ends_when_rank_0_does(other_rank):
    process, link = other_rank
    link.close()
    assert process.wait(20) == 1


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": 2}, "rank is 2; .* it must be at most 1"),
        ({"local_ranks": 3}, "local_ranks is 3; from rank 0 on there are 2"),
        ({"local_ranks": 1}, "master_port is 0; it must be set"),
        ({"disk_kv_memory_gb": 1.0}, "disk_kv_memory_gb is 1.0; it must be 0 with"),
        ({"device": "cuda:1"}, "device is cuda:1, which is one GPU, but 2 ranks run here"),
    ],
)
def test_settings_that_no_group_can_have_are_refused(changes, problem):
    with pytest.raises(ValidationError, match=problem):
        settings(**changes)

"""How many threads a worker on a CPU has, and on which cores they are."""

import os

import pytest
import structlog
import torch

from gpu_worker.loading import threads
from gpu_worker.loading.checked_model import check_model
from gpu_worker.parallel.member import Member
from gpu_worker.settings import WorkerSettings
from gpu_worker.weights.json_fields import ModelError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """64 logical CPUs on 32 physical cores of two sockets, as files; returns the control group's
    directory. The sockets' cores take turns."""
    for cpu in range(64):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 32},{cpu % 32 + 32}\n")
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(threads, "_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(threads, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (tmp_path / "cgroup" / "cpu").mkdir(parents=True)
    return tmp_path / "cgroup"


def test_without_a_limit_there_is_a_thread_for_each_physical_core(machine):
    assert threads.num_usable_cores() == 32
    (machine / "cpu.max").write_text("max 100000\n")
    assert threads.num_usable_cores() == 32


@pytest.mark.parametrize(
    ("quota_us", "num_cores"), [(200000, 2), (150000, 2), (10000, 1), (4800000, 32)]
)
def test_a_control_group_s_limit_is_rounded_up(machine, quota_us, num_cores):
    (machine / "cpu.max").write_text(f"{quota_us} 100000\n")
    assert threads.set_num_threads(None) == num_cores
    assert torch.get_num_threads() == num_cores


@pytest.mark.parametrize(("quota_us", "num_cores"), [(-1, 32), (125000, 3)])
def test_version_1_of_control_groups_has_two_files(machine, quota_us, num_cores):
    (machine / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (machine / "cpu" / "cpu.cfs_period_us").write_text("50000\n")
    assert threads.num_usable_cores() == num_cores


def test_the_setting_counts_more_than_the_limit_and_ranks_share(machine):
    (machine / "cpu.max").write_text("400000 100000\n")
    assert threads.set_num_threads(None, num_sharing=2) == 2
    assert threads.set_num_threads(6) == 6


@pytest.mark.usefixtures("machine")
def test_a_system_without_affinity_counts_its_cpus(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert threads.num_usable_cores() == 5
    assert threads.usable_cores() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("machine")
def test_the_cores_of_a_socket_are_side_by_side(monkeypatch):
    assert threads.usable_cores() == [*range(0, 32, 2), *range(1, 32, 2)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 35, 36, 6, 37})
    assert threads.usable_cores() == [6, 36, 3, 37], "35 is on the core of 3"


@pytest.mark.usefixtures("machine")
def test_cores_that_the_system_does_not_tell_apart_are_its_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {64, 1, 33})
    assert threads.usable_cores() == [1, 33, 64]


class FakeLibrary:
    """The kernels in C, on a system that can pin threads or cannot."""

    def __init__(self, *, can_pin=True):
        self.pinned = []
        self._can_pin = can_pin

    def pin_threads(self, cpus):
        self.pinned.append(cpus)
        return self._can_pin


@pytest.mark.usefixtures("machine")
def test_threads_are_pinned_only_if_asked_and_ranks_have_their_own_cores(monkeypatch):
    library = FakeLibrary()
    monkeypatch.setattr(threads, "native", lambda: library)
    threads.pin_threads("off", CPU, 2, 0)
    threads.pin_threads("on", torch.device("cuda"), 2, 0)
    assert library.pinned == []
    for number in range(3):
        threads.pin_threads("on", CPU, 8, number)
    assert library.pinned == [
        [0, 2, 4, 6, 8, 10, 12, 14],
        [16, 18, 20, 22, 24, 26, 28, 30],
        [1, 3, 5, 7, 9, 11, 13, 15],
    ]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("num_threads", "number"), [(33, 0), (16, 2)])
def test_more_threads_than_cores_are_not_pinned(num_threads, number):
    needed = f"{number + 1} processes with {num_threads} threads .* may use 32"
    with pytest.raises(ModelError, match=needed):
        threads.pin_threads("on", CPU, num_threads, number)


@pytest.mark.usefixtures("machine")
def test_a_worker_pins_its_threads_before_it_reads_the_model(tmp_path):
    settings = WorkerSettings(
        model=str(tmp_path), device="cpu", num_threads=2, local_ranks=1, pin_threads="on"
    )
    with pytest.raises(ModelError, match="pin_threads is on: 17 processes"):
        check_model(Member(settings, number=16), lambda *_: None)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("library", [None, FakeLibrary(can_pin=False)])
def test_a_system_that_cannot_pin_is_warned_of(monkeypatch, library):
    monkeypatch.setattr(threads, "native", lambda: library)
    with structlog.testing.capture_logs() as logs:
        threads.pin_threads("on", CPU, 2, 0)
    assert [(each["log_level"], "not pinned" in each["event"]) for each in logs] == [
        ("warning", True)
    ]

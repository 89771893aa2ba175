"""How many threads a worker on a CPU has."""

import os

import pytest
import torch

from gpu_worker.loading import device


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """64 logical CPUs on 32 physical cores, as files; returns the control group's directory."""
    for cpu in range(64):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 32},{cpu % 32 + 32}\n")
    monkeypatch.setattr(device, "_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(device, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    (tmp_path / "cgroup" / "cpu").mkdir(parents=True)
    return tmp_path / "cgroup"


def test_without_a_limit_there_is_a_thread_for_each_physical_core(machine):
    assert device.num_usable_cores() == 32
    (machine / "cpu.max").write_text("max 100000\n")
    assert device.num_usable_cores() == 32


@pytest.mark.parametrize(
    ("quota_us", "num_cores"), [(200000, 2), (150000, 2), (10000, 1), (4800000, 32)]
)
def test_a_control_group_s_limit_is_rounded_up(machine, quota_us, num_cores):
    (machine / "cpu.max").write_text(f"{quota_us} 100000\n")
    assert device.set_num_threads(None) == num_cores
    assert torch.get_num_threads() == num_cores


@pytest.mark.parametrize(("quota_us", "num_cores"), [(-1, 32), (125000, 3)])
def test_version_1_of_control_groups_has_two_files(machine, quota_us, num_cores):
    (machine / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (machine / "cpu" / "cpu.cfs_period_us").write_text("50000\n")
    assert device.num_usable_cores() == num_cores


def test_the_setting_counts_more_than_the_limit_and_ranks_share(machine):
    (machine / "cpu.max").write_text("400000 100000\n")
    assert device.set_num_threads(None, num_sharing=2) == 2
    assert device.set_num_threads(6) == 6


@pytest.mark.usefixtures("machine")
def test_a_system_without_affinity_counts_its_cpus(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert device.num_usable_cores() == 5

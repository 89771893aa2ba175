"""A worker reports when its device's memory gets short, once for each change."""

import structlog
import torch
from prometheus_client import REGISTRY

from contract.info import MemoryLevel
from gpu_worker.memory import available as memory
from gpu_worker.memory.watch import CpuSystem, DeviceMemory, MemoryMonitor


class FakeDriver:
    """The driver of a device with 1000 bytes, 900 of them reserved by torch."""

    def __init__(self):
        self.free, self.allocated = 100, 800

    def read(self):
        return DeviceMemory(1000, self.free, 900, self.allocated, split=90)


def test_levels_follow_available_memory_and_are_logged_once():
    driver = FakeDriver()
    monitor = MemoryMonitor(driver)
    with structlog.testing.capture_logs() as logs:
        assert monitor.check() is MemoryLevel.OK
        driver.free, driver.allocated = 10, 890  # 20 bytes are available
        assert monitor.check() is MemoryLevel.WARNING
        assert monitor.check() is MemoryLevel.WARNING
        driver.free, driver.allocated = 0, 891
        assert monitor.check() is MemoryLevel.CRITICAL
        driver.free = 100
        assert [monitor.check() for _ in range(5)] == [MemoryLevel.CRITICAL] * 4 + [MemoryLevel.OK]
    assert monitor.level is MemoryLevel.OK
    told = [(line["log_level"], line["before"], line["level"]) for line in logs]
    assert told == [
        ("warning", "OK", "WARNING"),
        ("warning", "WARNING", "CRITICAL"),
        ("info", "CRITICAL", "OK"),
    ]
    assert logs[1]["available_bytes"] == 9


def test_a_driver_that_fails_is_watched_no_more_and_nothing_is_short_for_it():
    driver = FakeDriver()
    monitor = MemoryMonitor(driver, warning_share=1.0)
    assert monitor.check() is MemoryLevel.WARNING

    def fail():
        raise RuntimeError("the device is gone")

    driver.read = fail
    with structlog.testing.capture_logs() as logs:
        monitor.run()
    assert monitor.level is None
    assert logs[0]["error"] == "the device is gone"
    assert REGISTRY.get_sample_value("quire_worker_device_memory_level") == 0


def test_metrics_have_what_driver_and_allocator_say():
    MemoryMonitor(FakeDriver()).check()
    name = "quire_worker_device_memory_bytes"
    values = {
        kind: REGISTRY.get_sample_value(name, {"kind": kind})
        for kind in ("total", "free", "reserved", "allocated")
    }
    assert values == {"total": 1000, "free": 100, "reserved": 900, "allocated": 800}
    assert REGISTRY.get_sample_value("quire_worker_device_memory_fragmentation") == 0.1
    assert REGISTRY.get_sample_value("quire_worker_device_memory_level") == 0


def test_a_device_of_which_torch_has_nothing_is_not_fragmented():
    assert DeviceMemory(1000, 1000, 0, 0, 0).fragmentation == 0


def test_a_cpu_has_what_its_control_group_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("990\n")
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 15\n")
    seen = CpuSystem(torch.device("cpu")).read()
    assert (seen.total, seen.available) == (1000, 25)


def test_unmapped_file_pages_count_as_available(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    stat = "file_mapped {mapped}\ninactive_file 15\nactive_file 60\n"
    for mapped, available in ((20, 55), (70, 15)):
        (tmp_path / "memory.stat").write_text(stat.format(mapped=mapped))
        assert CpuSystem(torch.device("cpu")).read().available == available

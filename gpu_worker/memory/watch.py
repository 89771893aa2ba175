"""Watches the memory of the worker's device on a thread, and reports shortages.

The readings of a GPU come from its driver and torch's allocator. The readings of a CPU come from
the machine and the process's control group.
"""

import threading
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from contract.info import MemoryLevel
from gpu_worker import metrics
from gpu_worker.memory.available import device_available_bytes, device_total_bytes
from gpu_worker.memory.pressure_level import LevelMeter, choose_thresholds

_INTERVAL_S = 1.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A reading, in bytes."""

    total: int
    free: int
    """Memory that the driver reports as free; on a CPU, memory that the process may still take."""
    reserved: int
    """Memory that torch's allocator has reserved."""
    allocated: int
    """Part of `reserved` that tensors use."""
    split: int
    """Part of `reserved` that is free between tensors. It can be reused, but not released."""

    @property
    def available(self) -> int:
        """Bytes that this process can still allocate, including gaps between tensors (`split`)."""
        return self.free + self.reserved - self.allocated

    @property
    def fragmentation(self) -> float:
        """Share of `reserved` that is free between tensors."""
        return self.split / self.reserved if self.reserved else 0.0


class Driver(Protocol):
    """Reads a device's memory."""

    def read(self) -> DeviceMemory:
        """Take a reading. Any thread may call this."""


class CudaDriver:
    """Reads the memory of a GPU from its driver and from torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> DeviceMemory:
        """See `Driver`."""
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        return DeviceMemory(
            total=total,
            free=free,
            reserved=stats.get("reserved_bytes.all.current", 0),
            allocated=stats.get("allocated_bytes.all.current", 0),
            split=stats.get("inactive_split_bytes.all.current", 0),
        )


class CpuSystem:
    """Reads how much memory the machine and the control group allow this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> DeviceMemory:
        """See `Driver`."""
        total = device_total_bytes(self._device)
        free = device_available_bytes(self._device)
        return DeviceMemory(total, free, reserved=0, allocated=0, split=0)


def watch_device(
    device: torch.device, warning_share: float | None, critical_share: float | None
) -> "MemoryMonitor":
    """Start watching a ready worker's device; `choose_thresholds` explains the shares."""
    driver = CudaDriver(device) if device.type == "cuda" else CpuSystem(device)
    monitor = MemoryMonitor(driver, warning_share, critical_share)
    monitor.start()
    return monitor


class MemoryMonitor:
    """Keeps the level of memory pressure, writes metrics, and logs changes of the level."""

    def __init__(
        self,
        driver: Driver,
        warning_share: float | None = None,
        critical_share: float | None = None,
    ) -> None:
        """Take a first reading, and use it to choose each share that is None."""
        self._driver = driver
        first = driver.read()
        self._thresholds = choose_thresholds(
            warning_share, critical_share, first.available, first.total
        )
        self._meter = LevelMeter()
        self._has_failed = False
        self._stopped = threading.Event()

    @property
    def level(self) -> MemoryLevel | None:
        """The level at the last reading; None if watching has failed."""
        return None if self._has_failed else self._meter.level

    def check(self) -> MemoryLevel:
        """Take a reading, update the metrics, and return the new level."""
        seen = self._driver.read()
        kinds = {
            "total": seen.total,
            "free": seen.free,
            "reserved": seen.reserved,
            "allocated": seen.allocated,
        }
        for kind, num_bytes in kinds.items():
            metrics.DEVICE_MEMORY_BYTES.labels(kind).set(num_bytes)
        metrics.DEVICE_MEMORY_FRAGMENTATION.set(seen.fragmentation)
        before = self._meter.level
        level = self._meter.add(self._thresholds.level(seen.available, seen.total))
        metrics.DEVICE_MEMORY_LEVEL.set(level.value)
        if level is not before:
            tell = _log.info if level is MemoryLevel.OK else _log.warning
            tell(
                "device memory",
                level=level.name,
                before=before.name,
                available_bytes=seen.available,
                fragmentation=round(seen.fragmentation, 3),
                **kinds,
            )
        return level

    def start(self) -> None:
        """Take a reading every second, on a daemon thread."""
        threading.Thread(target=self.run, name="device-memory", daemon=True).start()

    def stop(self) -> None:
        """Stop watching, and set the metric of the level to 0."""
        self._stopped.set()
        metrics.DEVICE_MEMORY_LEVEL.set(MemoryLevel.OK.value)

    def run(self) -> None:
        """Take readings until one fails or `stop` is called."""
        try:
            while not self._stopped.is_set():
                self.check()
                self._stopped.wait(_INTERVAL_S)
        except (RuntimeError, OSError, ValueError) as error:  # steps report a device's failure
            self._has_failed = True
            metrics.DEVICE_MEMORY_LEVEL.set(MemoryLevel.OK.value)
            _log.warning("stopped watching device memory", error=str(error))

"""Watches the memory of a worker's device, beside its steps; tells when it gets short.

Of a GPU as its driver and torch's allocator see it, of a CPU as the machine and the process's
control group do.
"""

import threading
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from contract.info import MemoryLevel
from gpu_worker import metrics
from gpu_worker.memory.available import device_available_bytes, device_total_bytes
from gpu_worker.memory.level import LevelMeter, choose_thresholds

_INTERVAL_S = 1.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """In bytes."""

    total: int
    free: int
    """What the driver has to give, to this process or another; of a CPU what the system has."""
    reserved: int
    """What torch has of it."""
    allocated: int
    """What of that tensors have."""
    split: int
    """What of it is free between tensors: to be reused, but not to be given back."""

    @property
    def available(self) -> int:
        """What this process can still have, in pieces of whatever size."""
        return self.free + self.reserved - self.allocated

    @property
    def fragmentation(self) -> float:
        """The share of what torch has that is free between tensors."""
        return self.split / self.reserved if self.reserved else 0.0


class Driver(Protocol):
    """What is asked."""

    def read(self) -> DeviceMemory:
        """The memory as it is now; any thread may call it."""


class CudaDriver:
    """The driver of a device, and torch's allocator on it."""

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
    """What the machine, or the control group of this process, lets it have."""

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
    """Begin to watch a device that is ready to serve; `choose_thresholds` has the shares."""
    driver = CudaDriver(device) if device.type == "cuda" else CpuSystem(device)
    monitor = MemoryMonitor(driver, warning_share, critical_share)
    monitor.start()
    return monitor


class MemoryMonitor:
    """Has the level, tells metrics what there is, and the log when the level changes."""

    def __init__(
        self,
        driver: Driver,
        warning_share: float | None = None,
        critical_share: float | None = None,
    ) -> None:
        """Look what there is, by which thresholds that are not given are chosen."""
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
        """How short memory is, as of the last look; None: it is watched no more."""
        return None if self._has_failed else self._meter.level

    def check(self) -> MemoryLevel:
        """Look once."""
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
        level = self._meter.take(self._thresholds.level(seen.available, seen.total))
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
        """Look every second, on a thread that ends with the process at the latest."""
        threading.Thread(target=self.run, name="device-memory", daemon=True).start()

    def stop(self) -> None:
        """Look no more; as long as nobody does, memory counts as enough."""
        self._stopped.set()
        metrics.DEVICE_MEMORY_LEVEL.set(MemoryLevel.OK.value)

    def run(self) -> None:
        """Look until it cannot be done, or `stop`."""
        try:
            while not self._stopped.is_set():
                self.check()
                self._stopped.wait(_INTERVAL_S)
        except (RuntimeError, OSError, ValueError) as error:  # a device's failure the steps tell
            self._has_failed = True
            metrics.DEVICE_MEMORY_LEVEL.set(MemoryLevel.OK.value)  # as nothing is known
            _log.warning("device memory is watched no more", error=str(error))

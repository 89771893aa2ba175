"""Watches a GPU's memory as its driver and torch's allocator see it; tells when it gets short."""

import threading
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import structlog
import torch

from gpu_worker import metrics

_WARNING_SHARE = 0.03
_CRITICAL_SHARE = 0.01
_INTERVAL_S = 5.0

_log = structlog.get_logger()


class Level(Enum):
    """How short memory is: less than 3 %, or 1 %, of all can still be had."""

    OK = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """In bytes."""

    total: int
    free: int
    """What the driver has to give, to this process or another."""
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

    @property
    def level(self) -> Level:
        """How short it is."""
        if self.available < _CRITICAL_SHARE * self.total:
            return Level.CRITICAL
        return Level.WARNING if self.available < _WARNING_SHARE * self.total else Level.OK


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


class MemoryMonitor:
    """Tells metrics what there is, and the log when the level changes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._level = Level.OK

    def check(self) -> Level:
        """Look once."""
        memory = self._driver.read()
        kinds = {
            "total": memory.total,
            "free": memory.free,
            "reserved": memory.reserved,
            "allocated": memory.allocated,
        }
        for kind, num_bytes in kinds.items():
            metrics.DEVICE_MEMORY_BYTES.labels(kind).set(num_bytes)
        metrics.DEVICE_MEMORY_FRAGMENTATION.set(memory.fragmentation)
        metrics.DEVICE_MEMORY_LEVEL.set(memory.level.value)
        if memory.level is not self._level:
            tell = _log.info if memory.level is Level.OK else _log.warning
            tell(
                "device memory",
                level=memory.level.name,
                before=self._level.name,
                available_bytes=memory.available,
                fragmentation=round(memory.fragmentation, 3),
                **kinds,
            )
            self._level = memory.level
        return memory.level

    def start(self) -> None:
        """Look every five seconds, on a thread that ends with the process."""
        threading.Thread(target=self._run, name="device-memory", daemon=True).start()

    def _run(self) -> None:
        never = threading.Event()
        try:
            while True:
                self.check()
                never.wait(_INTERVAL_S)
        except RuntimeError as error:  # the device has failed, which the steps tell
            _log.warning("device memory is watched no more", error=str(error))

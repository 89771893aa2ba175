"""Reads how much memory a device has, and how much is free."""

from pathlib import Path

import torch

_UNKNOWN_BYTES = 2 * 1024**3
"""Assumed if the system reports nothing."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return how many more bytes the machine and the control group let this process allocate."""
    bounds = []
    if (available := _meminfo().get("MemAvailable")) is not None:
        bounds.append(available)
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        bounds.append(int(most) - int(used.read_text()) + _reclaimable_bytes())
    return min(bounds, default=_UNKNOWN_BYTES)


def device_available_bytes(device: torch.device) -> int:
    """Return the free bytes of the device; for a CPU, `available_bytes`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def device_total_bytes(device: torch.device) -> int:
    """Return the device's total bytes; for a CPU, all that machine and control group allow."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    bounds = []
    if (total := _meminfo().get("MemTotal")) is not None:
        bounds.append(total)
    limit = _CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        bounds.append(int(most))
    return min(bounds, default=_UNKNOWN_BYTES)


def _reclaimable_bytes() -> int:
    """Return the bytes of page cache that count as used but are freed when memory is needed.

    Recently used pages of files are included, except as many as are mapped into processes. If all
    recently used pages were left out, a growing page cache would look like a memory shortage.
    """
    stat = _CGROUP / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    numbers = {name: int(value) for name, value in (line.split(maxsplit=1) for line in lines)}
    unmapped = numbers.get("active_file", 0) - numbers.get("file_mapped", 0)
    return numbers.get("inactive_file", 0) + max(0, unmapped)


def _meminfo() -> dict[str, int]:
    """Read the fields of /proc/meminfo, in bytes; empty if there is no such file."""
    if not _MEMINFO.exists():
        return {}
    fields = (line.split(":") for line in _MEMINFO.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in fields}

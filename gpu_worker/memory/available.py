"""How much memory a device has, and how much of it is left."""

from pathlib import Path

import torch

_UNKNOWN_BYTES = 2 * 1024**3
"""Assumed where the system tells nothing."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that this process may still take, as far as the system tells."""
    bounds = []
    if (available := _meminfo().get("MemAvailable")) is not None:
        bounds.append(available)
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        bounds.append(int(most) - int(used.read_text()) + _reclaimable_bytes())
    return min(bounds, default=_UNKNOWN_BYTES)


def device_available_bytes(device: torch.device) -> int:
    """Memory that the device has left; a CPU's is the process's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def device_total_bytes(device: torch.device) -> int:
    """Memory that the device has in all; a CPU's is what the machine lets the process have."""
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
    """Of what counts as used: files' pages that the system drops when somebody needs room.

    Those used lately that nobody maps are among them: else a cache that fills up would look like
    memory that gets short.
    """
    stat = _CGROUP / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    numbers = {name: int(value) for name, value in (line.split(maxsplit=1) for line in lines)}
    unmapped = numbers.get("active_file", 0) - numbers.get("file_mapped", 0)
    return numbers.get("inactive_file", 0) + max(0, unmapped)


def _meminfo() -> dict[str, int]:
    """What the kernel tells of the machine's memory, in bytes."""
    if not _MEMINFO.exists():
        return {}
    fields = (line.split(":") for line in _MEMINFO.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in fields}

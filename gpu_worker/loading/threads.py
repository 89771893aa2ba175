"""Picks the number of threads that compute on a CPU, and the cores on which they run."""

import math
import os
from pathlib import Path

import structlog
import torch

from gpu_worker.weights.json_fields import ModelError
from kernels.cpu.library import native

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")

_log = structlog.get_logger()


def set_num_threads(num_threads: int | None, num_sharing: int = 1) -> int:
    """Set torch's number of threads, by default `num_usable_cores`, and return it.

    If `num_sharing` processes share the cores, each gets an equal part of the threads.
    """
    count = max(1, (num_threads or num_usable_cores()) // num_sharing)
    torch.set_num_threads(count)
    return count


def pin_threads(wanted: str, device: torch.device, num_threads: int, number: int) -> None:
    """Pin the threads of the kernels in C to a core each, if the setting `pin_threads` says so.

    Call this before weights are packed, so that the weights are in the memory near the threads that
    read them. A lone thread is not pinned.

    Args:
        wanted: The setting, "on" or "off".
        device: Where the model runs.
        num_threads: The number of threads.
        number: This process's number among those that share the cores. Process 0 gets the first
            cores.

    Raises:
        ModelError: There are too few cores.
    """
    if wanted != "on":
        return
    if device.type != "cpu":
        _log.warning("the setting pin_threads is on, but has no effect", device=device.type)
        return
    if num_threads == 1:
        _log.warning("the setting pin_threads is on, but has no effect on one thread")
        return
    cores = usable_cores()
    own = cores[number * num_threads : (number + 1) * num_threads]
    if len(own) < num_threads:
        raise ModelError(
            f"pin_threads is on: {number + 1} processes with {num_threads} threads need as many"
            f" physical cores; this process may use {len(cores)}"
        )
    library = native()
    if library is None or not library.pin_threads(own):
        _log.warning("threads are not pinned: only those of kernels in C on Linux can be")
        return
    _log.info("each thread is pinned to a core", cpus=own)


def num_usable_cores() -> int:
    """Return how many cores this process may use.

    If the system does not say which logical CPUs share a core, each logical CPU counts as a core.
    If the control group limits the CPU time to that of fewer cores, only so many are counted,
    because more threads would use up the CPU time by spinning.
    """
    cores, quota = len(usable_cores()), _cpu_quota()
    return cores if quota is None else min(cores, math.ceil(quota))


def usable_cores() -> list[int]:
    """Return one logical CPU of each core that this process may use, socket after socket.

    If the system does not say which logical CPUs share a core, return all that this process may
    use.
    """
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[tuple[int, str], int] = {}  # by socket and the CPUs of the core
    try:
        for cpu in allowed:
            topology = _TOPOLOGY / f"cpu{cpu}/topology"
            socket = int((topology / "physical_package_id").read_text())
            cores.setdefault((socket, (topology / "thread_siblings_list").read_text()), cpu)
    except (OSError, ValueError):
        return allowed
    return [cpu for _, cpu in sorted((socket, cpu) for (socket, _), cpu in cores.items())]


def _cpu_quota() -> float | None:
    """Return how many CPUs' time the control group (v2 or v1) may use; None: no limit."""
    try:
        if (both := _CGROUP / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota = (_CGROUP / "cpu/cpu.cfs_quota_us").read_text()
            period = (_CGROUP / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return None

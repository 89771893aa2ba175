"""The private directory of one running service: sockets, logs, and what it is.

All services of a user live under one directory, each in one of its own that holds `service.json`
and a `lock` which the supervisor holds as long as it lives: pids are reused, locks are not.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


class ServiceDirError(Exception):
    """The directory cannot be used safely."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """One process of a service."""

    name: str
    http_address: str
    pid: int | None
    num_restarts: int


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What is running, as `quire status` and `quire down` need to know it."""

    pid: int
    """The supervisor."""
    model: str
    """Its directory."""
    model_name: str
    """The name that requests use."""
    http_address: str
    grpc_target: str
    log_dir: str
    processes: tuple[ServiceProcess, ...] = ()
    scheduler_target: str = ""
    """The scheduler's gRPC, for who operates the service; an older release does not say."""
    has_tls: bool = False
    """Whether what listens at TCP ports does so with TLS."""


class ServiceDir:
    """A directory whose lock this process holds, until `remove` or its end."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, root: Path | None = None) -> Self:
        """Make one; those of services that are gone are removed."""
        parent = _root(root)
        making = _open_lock(parent)
        try:
            # One at a time: a directory that is not locked yet looks like one that is gone.
            fcntl.flock(making, fcntl.LOCK_EX)
            for stale in _directories(parent):
                if not _is_locked(stale):
                    shutil.rmtree(stale, ignore_errors=True)
            path = Path(tempfile.mkdtemp(dir=parent))
            lock = _open_lock(path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        finally:
            os.close(making)
        (path / "logs").mkdir()
        return cls(path, lock)

    @property
    def log_dir(self) -> Path:
        """Where the logs go."""
        return self.path / "logs"

    def write(self, info: ServiceInfo) -> None:
        """Publish `info`; a reader sees the old or the new."""
        unfinished = self.path / "service.json.tmp"
        unfinished.write_text(json.dumps(asdict(info), indent=2) + "\n")
        unfinished.replace(self.path / "service.json")

    def remove(self) -> None:
        """Remove it and all in it, and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let go of the lock in this process; a forked child may still hold it."""
        os.close(self._lock)


def running_services(root: Path | None = None) -> Iterator[ServiceInfo]:
    """Read what runs now, of this user, in no particular order."""
    for path in _directories(_root(root)):
        if not _is_locked(path):
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            yield _parse(json.loads((path / "service.json").read_text()))


def find_service(
    services: Sequence[ServiceInfo], *, http_address: str, grpc_target: str
) -> ServiceInfo | None:
    """Give the one at these addresses."""
    for service in services:
        if (http_address, grpc_target) == (service.http_address, service.grpc_target):
            return service
    return None


def _parse(value: dict[str, object]) -> ServiceInfo:
    processes = value.pop("processes")
    if not isinstance(processes, list):
        raise TypeError("processes must be a list")
    return ServiceInfo(**value, processes=tuple(ServiceProcess(**p) for p in processes))  # type: ignore[arg-type]


def _root(root: Path | None) -> Path:
    path = root or Path(tempfile.gettempdir()) / f"quire-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.lstat()
    # Others could put sockets of theirs there.
    if (
        not path.is_dir()
        or path.is_symlink()
        or facts.st_uid != os.getuid()
        or facts.st_mode & 0o022
    ):
        raise ServiceDirError(f"{path} must be a directory that only you can write to")
    return path


def _directories(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


def _open_lock(directory: Path) -> int:
    return os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _is_locked(directory: Path) -> bool:
    try:
        # Never made here: its directory may be on the way out, and could not be removed then.
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # it is gone
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False

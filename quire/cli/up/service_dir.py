"""The private directory of one running service: sockets, logs, and a description of the service.

All services of a user have their directories in one parent directory. Each directory holds
`service.json`, and a `lock` file that the supervisor keeps locked while it runs. So the lock shows
whether the service runs. A pid would not show this, because the pid of an ended process may be used
again.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from pydantic import TypeAdapter


class ServiceDirError(Exception):
    """The directory cannot be used safely."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """One process of a service."""

    name: str
    http_address: str
    pid: int | None
    """The process id; None between the process's end and its restart."""
    num_restarts: int


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """The description of a service for `quire status`, `quire down` and other commands."""

    pid: int
    """The supervisor's process id."""
    model: str
    """The location of the first model: a path, a name on the hub, or a URL."""
    model_name: str
    """The name that requests use for the first model."""
    http_address: str
    """The router's HTTP address for this machine, "host:port"."""
    grpc_target: str
    log_dir: str
    processes: tuple[ServiceProcess, ...] = ()
    scheduler_target: str = ""
    """The scheduler's gRPC target, for operators. If there is a standby, two targets with a comma
    between them; only the scheduler that serves listens. Empty in files of older releases."""
    operator_target: str = ""
    """The router's gRPC target for operators; empty in files of older releases."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The location of each model, by its name, in the order of --model; empty in files of older
    releases."""
    scheduler_targets: Mapping[str, str] = field(default_factory=dict)
    """Each model's `scheduler_target`, by model name; empty in files of older releases."""
    other_operator_targets: tuple[str, ...] = ()
    """The `operator_target` of each router after the first; empty in files of older releases."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """The values of the flags of `quire up`, by name; empty in files of older releases."""
    has_tls: bool = False
    """Whether the TCP ports use TLS."""

    @property
    def title(self) -> str:
        """The names of the service's models."""
        return ", ".join(self.models) or self.model_name

    def is_at(self, http_port: int | None) -> bool:
        """Whether `http_port` is the router's HTTP port; None matches any port."""
        return http_port is None or self.http_address.endswith(f":{http_port}")


_MAX_KEPT: Final = 5
_JSON: Final = TypeAdapter(ServiceInfo)


class ServiceDir:
    """A service's directory, locked by this process until `release` or until the process ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, root: Path | None = None) -> Self:
        """Create a directory; remove the directories of ended services, except the last five."""
        parent = _root(root)
        making = _open_lock(parent)
        try:
            # Hold the parent's lock until the new directory's lock is held, because a directory
            # whose lock is free looks like an ended service's.
            fcntl.flock(making, fcntl.LOCK_EX)
            for stale in _left_behind(parent)[_MAX_KEPT:]:
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
        return self.path / "logs"

    def write(self, info: ServiceInfo) -> None:
        """Publish `info` atomically."""
        unfinished = self.path / "service.json.tmp"
        unfinished.write_bytes(_JSON.dump_json(info, indent=2))
        unfinished.replace(self.path / "service.json")

    def remove(self) -> None:
        """Remove the directory and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def leave(self) -> None:
        """Release the lock; keep the logs and the description for `quire logs`."""
        for path in self.path.glob("*.sock"):
            path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the lock in this process; a forked child may still hold it."""
        os.close(self._lock)


def ended_services(root: Path | None = None) -> list[ServiceInfo]:
    """Return this user's ended services whose logs remain, newest first."""
    found: list[ServiceInfo] = []
    for path in _left_behind(_root(root)):
        with contextlib.suppress(OSError, ValueError):
            found.append(_JSON.validate_json((path / "service.json").read_bytes()))
    return found


def running_services(root: Path | None = None) -> Iterator[ServiceInfo]:
    """Return this user's running services, in no particular order."""
    for path in _directories(_root(root)):
        if _is_locked(path):
            # The file may be missing, because the service has just started, or be another
            # release's.
            with contextlib.suppress(OSError, ValueError):
                yield _JSON.validate_json((path / "service.json").read_bytes())


def _root(root: Path | None) -> Path:
    path = root or Path(tempfile.gettempdir()) / f"quire-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.lstat()
    # Other users must not be able to put sockets there.
    is_private = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    if not path.is_dir() or path.is_symlink() or not is_private:
        raise ServiceDirError(f"{path} must be a directory that only you can write to")
    return path


def _directories(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


def _left_behind(root: Path) -> list[Path]:
    """Return the directories of ended services, newest first."""
    gone = [path for path in _directories(root) if not _is_locked(path)]
    return sorted(gone, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _open_lock(directory: Path) -> int:
    return os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _is_locked(directory: Path) -> bool:
    try:
        # O_CREAT is not set, because a new file would prevent the removal of the directory.
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False

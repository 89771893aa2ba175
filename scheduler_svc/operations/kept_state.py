"""The scheduler's state file, from which the next start continues.

The file is a small JSON document. It has the loaded LoRA adapters, the sizes of resized pools, and
the accounts of the fair policy: for each tenant, how much a worker has served it.
"""

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import structlog

from contract.errors import QuireError
from contract.info import WorkerInfo
from contract.lora import LoraAdapter
from quire.v1 import scheduler_pb2
from scheduler_svc.operations.resizing import Resizer
from scheduler_svc.workers.roster import Roster
from scheduler_svc.workers.session import Session

_VERSION: Final = 1
_RETRY_S: Final = 5.0
_POLL_S: Final = 1.0
_ACCOUNTS_S: Final = 5.0
_MAX_ACCOUNTS: Final = 10_000
"""The limit on accounts that are stored for each worker. The accounts of the most served tenants
are stored. After a restart, tenants without a stored account are treated as new."""
_START: Final = re.compile(rb'\{"version": \d+, "start": (\d+)')
_HEAD_BYTES: Final = 256
_MAX_LEFT_WORKERS: Final = 64
"""The limit on unattached workers whose accounts stay in the file."""

log = structlog.get_logger()


class StateFileError(Exception):
    """The state file cannot be read."""


class StateFile:
    """The contents of the state file, which `run` writes; if `path` is None, there is no file."""

    def __init__(self, path: Path | None) -> None:
        """Read the file if it exists; raise StateFileError if it cannot be read."""
        self._path = path
        self._changed = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._has_ended = False
        self._lock = threading.Lock()
        # A thread reads these while it writes the file, so they are replaced, never modified.
        self.adapters: tuple[LoraAdapter, ...] = ()
        self._pools: Mapping[str, Mapping[str, Any]] = {}
        """For each worker, its model, the size of a block in bytes, and the number of blocks."""
        self._accounts: Mapping[str, Mapping[str, float]] = {}
        """For each worker, the accounts of its policy."""
        self._start = 1
        """How many schedulers have used the file, including this one. Only the newest scheduler
        may write the file."""
        if path is None or not path.exists():
            return
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["version"] != _VERSION:
                raise StateFileError(
                    f"--state-file {path} has version {state['version']}; this scheduler knows"
                    f" {_VERSION}"
                )
            self.adapters = tuple(
                LoraAdapter(each["name"], bytes.fromhex(each["digest"]), each["directory"])
                for each in state["adapters"]
            )
            self._pools = {
                worker: {
                    "model": str(pool["model"]),
                    "block_bytes": int(pool["block_bytes"]),
                    "num_blocks": int(pool["num_blocks"]),
                }
                for worker, pool in state["pools"].items()
            }
            self._accounts = {
                worker: {name: float(served) for name, served in accounts.items()}
                for worker, accounts in state.get("accounts", {}).items()
            }
            self._start = 1 + int(state.get("start", 0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateFileError(f"--state-file {path} cannot be read: {error!r}") from error

    async def written(self) -> None:
        """Wait until the changes made before this call are in the file, or a write has failed."""
        if self._path is not None and not self._has_ended:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._changed.set()
            await waiter

    def keep_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """Replace the list of adapters that operators have loaded; the file is written later."""
        self.adapters = tuple(adapters)
        self._changed.set()

    async def keep_pool(self, info: WorkerInfo, num_blocks: int) -> None:
        """Store the new size of a worker's pool, and wait as `written` does."""
        pool = {**_pool_of(info), "num_blocks": num_blocks}
        self._pools = {**self._pools, info.worker_id: pool}
        await self.written()

    def num_blocks(self, info: WorkerInfo) -> int | None:
        """Return the stored size of a worker's pool.

        None: no size is stored for the worker with its present model and block size.
        """
        pool = self._pools.get(info.worker_id, {})
        if {**pool, **_pool_of(info)} != pool:
            return None
        return int(pool["num_blocks"])

    def keep_accounts(self, accounts: Mapping[str, Mapping[str, float]]) -> None:
        """Store the accounts of the attached workers.

        Of the workers that are not attached, at most `_MAX_LEFT_WORKERS` keep their stored
        accounts.
        """
        self._set_accounts(_kept_accounts(accounts, self._accounts))

    def _set_accounts(self, after: Mapping[str, Mapping[str, float]] | None) -> None:
        if after is not None:
            self._accounts = after
            self._changed.set()

    def accounts_of(self, worker: str) -> Mapping[str, float]:
        """Return the stored accounts of a worker's policy."""
        return self._accounts.get(worker, {})

    async def run(
        self, accounts_now: Callable[[], Mapping[str, Callable[[], Mapping[str, float]]]]
    ) -> None:
        """Write changes to the file until cancelled; if a write fails, try again later.

        `accounts_now` returns, for each attached worker, a function that reads the worker's
        accounts. The accounts change all the time, so they are read every few seconds. To read
        10,000 accounts takes a millisecond, so after reading each worker's accounts, this
        method lets other tasks run. A thread chooses the accounts to store, and writes the file.
        """
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ACCOUNTS_S):
                        await self._changed.wait()
                now = {}
                for worker, accounts in accounts_now().items():
                    now[worker] = accounts()
                    await asyncio.sleep(0)
                self._set_accounts(await asyncio.to_thread(_kept_accounts, now, self._accounts))
                if not self._changed.is_set():
                    continue
                self._changed.clear()
                waiting, self._waiting = self._waiting, []
                has_failed = False
                try:
                    await asyncio.to_thread(self._write)
                except OSError as error:
                    log.error("the state file cannot be written", error=str(error))  # noqa: TRY400
                    self._changed.set()
                    has_failed = True
                finally:
                    _answer(waiting)
                if has_failed:
                    await asyncio.sleep(_RETRY_S)
        finally:
            self.keep_accounts({worker: each() for worker, each in accounts_now().items()})
            if self._changed.is_set():
                with contextlib.suppress(OSError):
                    self._write()
            self._has_ended = True
            _answer(self._waiting)

    def _contents(self) -> Iterator[str]:
        """Yield the file's text in small parts.

        The event loop stands still while the writing thread encodes a part, because the thread
        then holds Python's global lock (the GIL). Small parts keep each pause short.
        """
        adapters = [
            {"name": each.name, "digest": each.digest.hex(), "directory": each.directory}
            for each in self.adapters
        ]
        head = {
            "version": _VERSION,
            "start": self._start,
            "adapters": adapters,
            "pools": self._pools,
        }
        yield json.dumps(head).removesuffix("}") + ', "accounts": {'
        for index, (worker, accounts) in enumerate(self._accounts.items()):
            yield f"{', ' if index else ''}{json.dumps(worker)}: {json.dumps(accounts)}"
        yield "}}"

    def _write(self) -> None:
        with self._lock:
            if self._path is None or _start_of(self._path) > self._start:
                return  # a newer scheduler owns the file; this one was only suspended
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Each scheduler has its own temporary file: a suspended one may be writing, too.
            new = self._path.with_name(f"{self._path.name}.{self._start}.new")
            new.touch(mode=0o600)  # names of tenants are private
            with new.open("w", encoding="utf-8") as file:
                file.writelines(self._contents())
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)


def _start_of(path: Path) -> int:
    """Read from the first bytes of a file how many schedulers have used it; 0: unknown."""
    try:
        with path.open("rb") as file:
            found = _START.match(file.read(_HEAD_BYTES))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _kept_accounts(
    accounts: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]]
) -> Mapping[str, Mapping[str, float]] | None:
    """Return the accounts to store; None: they are the same as `before`.

    `accounts` are the accounts of the attached workers now, and `before` the stored accounts of all
    workers.
    """
    now = {
        worker: each
        if len(each) <= _MAX_ACCOUNTS
        else dict(nlargest(_MAX_ACCOUNTS, each.items(), key=itemgetter(1)))
        for worker, each in accounts.items()
        if each
    }
    others = [item for item in before.items() if item[0] not in accounts]
    after = {**dict(others[-_MAX_LEFT_WORKERS:]), **now}
    return None if after == before else after


def _answer(waiting: Sequence[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)


def accounts_of(roster: Roster) -> Mapping[str, Callable[[], Mapping[str, float]]]:
    """Return, for each worker id, a function that reads the accounts of the worker's policy."""
    return {each.info.worker_id: each.accounts for each in roster.sessions.values()}


def _pool_of(info: WorkerInfo) -> dict[str, Any]:
    return {"model": info.model_id, "block_bytes": info.block_bytes}


async def restore_pools(state: StateFile, roster: Roster, resizer: Resizer) -> None:
    """Resize the pool of each newly attached worker to its stored size, until cancelled."""
    seen: dict[str, Session] = {}
    while True:
        sessions = roster.sessions
        for worker, session in sessions.items():
            if seen.get(worker) is session:
                continue
            num_blocks = state.num_blocks(session.info)
            if num_blocks is None or num_blocks == session.load().num_blocks:
                continue
            try:
                resizer.begin(scheduler_pb2.ResizeKvRequest(worker=worker, num_blocks=num_blocks))
            except QuireError as error:
                log.warning("a pool keeps its size", worker=worker, reason=str(error))
        seen = sessions
        await asyncio.sleep(_POLL_S)

"""What operators have set while the service ran, in a file, so that the next start sets it again.

The file is small JSON: the LoRA adapters that were loaded, and the sizes that pools were given.
"""

import asyncio
import json
import os
from collections.abc import Sequence
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

log = structlog.get_logger()


class StateFileError(Exception):
    """The file cannot be read."""


class StateFile:
    """The file's contents, and the task that writes them. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, if there is one; raises StateFileError."""
        self._path = path
        self._changed = asyncio.Event()
        self.adapters: tuple[LoraAdapter, ...] = ()
        self._pools: dict[str, dict[str, Any]] = {}
        """By worker: its model, the bytes of a block, and the number of blocks."""
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateFileError(f"--state-file {path} cannot be read: {error!r}") from error

    def keep_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """Keep the adapters that operators have loaded."""
        self.adapters = tuple(adapters)
        self._changed.set()

    def keep_pool(self, info: WorkerInfo, num_blocks: int) -> None:
        """Keep the size that a worker's pool was given."""
        self._pools[info.worker_id] = {**_pool_of(info), "num_blocks": num_blocks}
        self._changed.set()

    def num_blocks(self, info: WorkerInfo) -> int | None:
        """Return the size that a worker's pool was given for its model, if any."""
        pool = self._pools.get(info.worker_id, {})
        if {**pool, **_pool_of(info)} != pool:
            return None
        return int(pool["num_blocks"])

    async def run(self) -> None:
        """Write what changes; a full disk delays it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await asyncio.to_thread(self._write, self._contents())
            except OSError as error:
                log.error("the state file cannot be written", error=str(error))  # noqa: TRY400
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    def _contents(self) -> str:
        adapters = [
            {"name": each.name, "digest": each.digest.hex(), "directory": each.directory}
            for each in self.adapters
        ]
        return json.dumps({"version": _VERSION, "adapters": adapters, "pools": self._pools})

    def _write(self, contents: str) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        with new.open("w", encoding="utf-8") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


def _pool_of(info: WorkerInfo) -> dict[str, Any]:
    return {"model": info.model_id, "block_bytes": info.block_bytes}


async def restore_pools(state: StateFile, roster: Roster, resizer: Resizer) -> None:
    """Give the pools of workers that are attached the sizes that they had."""
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

"""Keeps processes running: starts them, restarts one that dies, stops them in order."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.cli.up.child import Child, ProcessSpec, describe_exit

_LOG_LINES: Final = 15
_LOG_LINES_RESTART: Final = 3
_STOP_SLACK_S: Final = 5.0
"""What a process has beyond its drain to end."""


class StartError(Exception):
    """A process ended before the service was ready once. The message holds its last log lines."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a restart."""

    first_s: float = 0.5
    most_s: float = 30.0
    forget_after_s: float = 60.0
    """A process that ran for so long begins again with `first_s`."""

    def delay_s(self, num_deaths: int) -> float:
        """Double with each death in a row; `num_deaths` is at least 1."""
        return min(self.most_s, self.first_s * 2.0 ** min(num_deaths - 1, 30))


@dataclass(frozen=True, slots=True)
class Running:
    """A process as it runs now."""

    spec: ProcessSpec
    pid: int | None
    """None between two starts."""
    num_restarts: int


class _Slot:
    """One spec, and the child that runs it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.num_starts = 0
        self.num_deaths = 0  # in a row


class Supervisor:
    """Owns the children of one service.

    Until `mark_started`, a process that ends is a failure of the start; from then on it is
    restarted. `report` gets lines for a person; `on_change` is called after each start and end.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        *,
        drain_s: float,
        report: Callable[[str], None],
        on_change: Callable[[Sequence[Running]], None] = lambda _: None,
        backoff: Backoff | None = None,
    ) -> None:
        self._slots = [_Slot(spec) for spec in specs]
        self._log_dir = log_dir
        self._drain_s = drain_s
        self._report = report
        self._on_change = on_change
        self._backoff = backoff or Backoff()
        self._started = False
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()

    def mark_started(self) -> None:
        """The service was ready: from now on what dies is restarted."""
        self._started = True

    def stop(self) -> None:
        """Make `run` stop everything; the second call ends what is left at once."""
        if self._stopping.is_set():
            self._forced.set()
        else:
            self._report("stopping; once more ends everything at once")
        self._stopping.set()

    @property
    def running(self) -> list[Running]:
        """The processes, in the order of the specs."""
        return [
            Running(
                spec=slot.spec,
                pid=None if slot.child is None else slot.child.pid,
                num_restarts=max(0, slot.num_starts - 1),
            )
            for slot in self._slots
        ]

    async def run(self) -> None:
        """Run until `stop`; when it returns or raises no process is left.

        Raises StartError.
        """
        keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        try:
            await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not self._stopping.is_set():  # a failed start, or we are cancelled: nobody waits
                self._stopping.set()
                self._forced.set()
            await self._stop_all()
            results = await asyncio.gather(*keepers, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _keep(self, slot: _Slot) -> None:
        """Run one process again and again; returns when stopping."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                try:
                    child = self._start(slot)
                except OSError as error:
                    self._after_failed_start(slot, error)
                    await self._back_off(slot, stopping)
                    continue
                started_at = time.monotonic()
                ended = asyncio.create_task(child.wait())
                await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
                if self._stopping.is_set():
                    ended.cancel()
                    return  # `_stop_all` sees to the child
                child.kill()  # what it started itself and left behind
                slot.child = None
                self._on_change(self.running)
                lived_s = time.monotonic() - started_at
                self._after_death(slot, child, lived_s)
                await self._back_off(slot, stopping)
        finally:
            stopping.cancel()

    async def _back_off(self, slot: _Slot, stopping: asyncio.Task[bool]) -> None:
        await asyncio.wait((stopping,), timeout=self._backoff.delay_s(slot.num_deaths))

    def _start(self, slot: _Slot) -> Child:
        slot.child = Child.start(slot.spec, self._log_dir / f"{slot.spec.name}.log")
        slot.num_starts += 1
        self._on_change(self.running)
        if slot.num_starts > 1:
            self._report(f"{slot.spec.name} started again as pid {slot.child.pid}")
        return slot.child

    def _after_failed_start(self, slot: _Slot, error: OSError) -> None:
        problem = f"{slot.spec.name} cannot be started: {slot.spec.argv[0]}: {error.strerror}"
        if not self._started:
            raise StartError(problem)
        slot.num_deaths += 1
        self._report(f"{problem}; trying again in {self._backoff.delay_s(slot.num_deaths):g} s")

    def _after_death(self, slot: _Slot, child: Child, lived_s: float) -> None:
        end = describe_exit(child.exit_code or 0)
        num_lines = _LOG_LINES_RESTART if self._started else _LOG_LINES
        log = "".join(f"\n  | {line}" for line in child.log_tail(num_lines))
        if not self._started:
            raise StartError(f"{slot.spec.name} {end} while starting; its log ends:{log}")
        slot.num_deaths = 1 if lived_s > self._backoff.forget_after_s else slot.num_deaths + 1
        delay_s = self._backoff.delay_s(slot.num_deaths)
        self._report(
            f"{slot.spec.name} (pid {child.pid}) {end} after {lived_s:.0f} s;"
            f" restarting in {delay_s:g} s; its log ends:{log}"
        )

    async def _stop_all(self) -> None:
        groups = sorted({slot.spec.stop_group for slot in self._slots})
        for group in groups:
            children = [s.child for s in self._slots if s.child and s.spec.stop_group == group]
            if not self._forced.is_set():
                for child in children:
                    child.terminate()
                await self._ended(children)
            for child in children:
                if child.exit_code is None and not self._forced.is_set():
                    self._report(f"{child.spec.name} (pid {child.pid}) does not end; killing it")
                child.kill()
            await asyncio.gather(*(child.wait() for child in children))

    async def _ended(self, children: Sequence[Child]) -> None:
        """Wait until all have ended, their time is over, or `stop` is called again."""
        ended = asyncio.ensure_future(asyncio.gather(*(child.wait() for child in children)))
        forced = asyncio.create_task(self._forced.wait())
        timeout_s = self._drain_s + _STOP_SLACK_S
        await asyncio.wait((ended, forced), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, forced):
            task.cancel()
        await asyncio.gather(ended, forced, return_exceptions=True)

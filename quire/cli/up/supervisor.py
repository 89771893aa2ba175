"""Keeps processes running: starts them, restarts dead ones, and stops them group by group."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.cli.up.child import Child, ProcessSpec, describe_exit
from quire.cli.up.service_dir import ServiceProcess

_LOG_LINES: Final = 15
_LOG_LINES_RESTART: Final = 3
_STOP_SLACK_S: Final = 5.0
"""How long a process may take to end after its drain time is over."""


class StartError(Exception):
    """A process could not be started, or ended before the service was ready.

    If the process ended, the message holds its last log lines.
    """


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a restart."""

    first_s: float = 0.5
    most_s: float = 30.0
    forget_after_s: float = 60.0
    """After a process has run for this long, its next backoff is `first_s` again."""

    def delay_s(self, num_deaths: int) -> float:
        """Return the backoff, which doubles with each death in a row.

        `num_deaths` is at least 1.
        """
        return min(self.most_s, self.first_s * 2.0 ** min(num_deaths - 1, 30))


class _Slot:
    """The spec of a process, and its current child process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.num_starts = 0
        self.num_deaths = 0  # deaths in a row


class Supervisor:
    """Owns the children of one service.

    A process that ends is restarted. Until `mark_started` is called, however, `run` raises
    StartError if a process ends with another exit code than its `harmless_exit_code`. `report` gets
    messages for the user. `on_change` is called after each start and each end of a process.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        *,
        drain_s: float,
        report: Callable[[str], None],
        on_change: Callable[[Sequence[ServiceProcess]], None] = lambda _: None,
        backoff: Backoff | None = None,
    ) -> None:
        self._slots = [_Slot(spec) for spec in specs]
        self._log_dir = log_dir
        self._drain_s = drain_s
        self._report = report
        self._on_change = on_change
        self._backoff = backoff or Backoff()
        self._started = False
        self._start_lock = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()

    def mark_started(self) -> None:
        """Restart processes that end from now on."""
        self._started = True

    def stop(self) -> None:
        """Drain and stop all processes; a second call kills them."""
        if self._stopping.is_set():
            self._forced.set()
            return
        self._report("stopping; a second signal kills everything at once")
        self._stopping.set()

    @property
    def running(self) -> list[ServiceProcess]:
        """The current processes, in the order of the specs."""
        return [
            ServiceProcess(
                name=slot.spec.name,
                http_address=slot.spec.http_address,
                pid=slot.child.pid if slot.child else None,
                num_restarts=max(0, slot.num_starts - 1),
            )
            for slot in self._slots
        ]

    async def run(self) -> None:
        """Run the processes until `stop` is called; no process is left when this method ends.

        May raise StartError.
        """
        keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        try:
            await asyncio.wait(keepers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not self._stopping.is_set():  # after a failed start or a cancellation, do not drain
                self._stopping.set()
                self._forced.set()
            await self._stop_all()
            results = await asyncio.gather(*keepers, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _keep(self, slot: _Slot) -> None:
        """Run one process again and again, until the supervisor stops."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                started_at = time.monotonic()
                try:
                    child = await self._start(slot)
                except OSError as error:
                    self._after_failed_start(slot, error)
                else:
                    if child is None:
                        return
                    ended = asyncio.create_task(child.wait())
                    await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
                    if self._stopping.is_set():
                        ended.cancel()
                        return  # `_stop_all` stops the child
                    child.kill()  # and the processes that it has started
                    slot.child = None
                    self._on_change(self.running)
                    self._after_death(slot, child, time.monotonic() - started_at)
                delay_s = self._backoff.delay_s(slot.num_deaths)
                await asyncio.wait((stopping,), timeout=delay_s)
        finally:
            stopping.cancel()

    async def _start(self, slot: _Slot) -> Child | None:
        """Start the slot's process; return None if the supervisor is stopping."""
        # Without the lock, `_stop_all` would miss a child that is being started.
        async with self._start_lock:
            if self._stopping.is_set():
                return None
            slot.child = await Child.start(slot.spec, self._log_dir / f"{slot.spec.name}.log")
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
        is_harmless = child.exit_code == slot.spec.harmless_exit_code
        if not self._started and not is_harmless:
            raise StartError(f"{slot.spec.name} {end} while starting; its log ends:{log}")
        slot.num_deaths = 1 if lived_s > self._backoff.forget_after_s else slot.num_deaths + 1
        delay_s = self._backoff.delay_s(slot.num_deaths)
        self._report(
            f"{slot.spec.name} (pid {child.pid}) {end} after {lived_s:.0f} s;"
            f" restarting in {delay_s:g} s; its log ends:{log}"
        )

    async def _stop_all(self) -> None:
        """Stop one group after another."""
        async with self._start_lock:
            slots = [(slot.spec.stop_group, slot.child) for slot in self._slots]
        for group in sorted({group for group, _ in slots}):
            children = [child for its_group, child in slots if child and its_group == group]
            if not self._forced.is_set():
                for child in children:
                    child.terminate()
                await self._wait_for_end(children)
            for child in children:
                if child.exit_code is None and not self._forced.is_set():
                    self._report(f"{child.spec.name} (pid {child.pid}) does not end; killing it")
                child.kill()
            await asyncio.gather(*(child.wait() for child in children))

    async def _wait_for_end(self, children: Sequence[Child]) -> None:
        """Wait until `children` have ended, their drain time is over, or `stop` is called again."""
        ended = asyncio.gather(*(child.wait() for child in children))
        forced = asyncio.create_task(self._forced.wait())
        timeout_s = self._drain_s + _STOP_SLACK_S
        await asyncio.wait((ended, forced), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (ended, forced):
            waiting.cancel()
        await asyncio.gather(ended, forced, return_exceptions=True)

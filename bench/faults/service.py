"""The service for chaos tests: processes, the links between them, and their faults."""

import asyncio
import contextlib
import itertools
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from faults.link import Link
from harness.case import BenchError
from harness.processes import Process, free_ports
from prometheus_client.parser import text_string_to_metric_families

_POLL_S = 0.05
_SUPERVISE_S = 0.5
_STOP_S = 30.0
_START_S = 180.0
_SCHEDULER = "scheduler"
"""In a fault, this name stands for the scheduler that serves now."""
_EXIT_STALE_EPOCH = 3
"""The exit code of a scheduler after a newer one has replaced it; `_supervise` restarts it."""


class What(StrEnum):
    """The kinds of faults of a process, or of the link before it."""

    KILLED = "killed"
    """SIGKILL, and a restart at once or after a second."""
    STOPPED = "stopped"
    """SIGSTOP, and SIGCONT after some seconds."""
    CUT = "link cut"
    """All connections break."""
    SILENT = "link silent"
    """The link delays all data for some seconds."""


@dataclass(frozen=True, slots=True)
class Fault:
    what: What
    name: str
    """The process, or the process behind the link."""
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of the process and that of the fault, for a table."""
        return f"{self.name.split('-')[0]} {self.what}"


class ChaosService:
    """Two routers, a scheduler and two workers, with a link before each gRPC port.

    With a standby there are two schedulers: one serves, and a restarted one stands by.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        num_blocks: int,
        *,
        has_standby: bool,
        worker_flags: Sequence[str],
        roles: Sequence[str],
        keeps_turns: bool,
        script: Path | None,
    ) -> None:
        """`directory` is for sockets, logs and turns; each device pool has `num_blocks` blocks.

        `roles` has one role for each worker. With `script`, the workers are simulated, and their
        outputs are those of the script.
        """
        self._directory = directory
        self._processes: dict[str, Process] = {}
        self._links: dict[str, Link] = {}
        self._supervisor: asyncio.Task[None] | None = None
        self._schedulers = [f"scheduler-{i}" for i in range(1 + has_standby)]
        self.routers = ["router-0", "router-1"]
        workers = ["worker-0", "worker-1"]
        self._ports = iter(free_ports(len((*workers, *self._schedulers, *self.routers))))
        for worker, role in zip(workers, roles, strict=True):
            kind = ("gpu_worker", "--device=cpu", "--num-threads=1", f"--role={role}")
            if script is not None:
                kind = ("sim_worker", f"--script={script}", f"--worker-id={worker}")
            self._add(
                *(worker, *kind, f"--model={model}", f"--num-blocks={num_blocks}"),
                *("--max-num-batched-tokens=512", *worker_flags),
            )
        for scheduler in self._schedulers:
            self._add(
                *(scheduler, "scheduler_svc", f"--workers={self._targets(workers)}"),
                *("--claim-s=5", *(("--standby",) if has_standby else ())),
            )
        schedulers = self._targets(self._schedulers)
        for router in self.routers:
            self._add(
                *(router, "router", f"--model={model}", f"--scheduler={schedulers}"),
                *((f"--turn-store={directory}/turns.sqlite",) if keeps_turns else ()),
            )

    @property
    def targets(self) -> list[str]:
        """Where clients find the routers."""
        return self._targets(self.routers).split(",")

    async def wait_until_ready(self, names: list[str] | None = None) -> None:
        """Wait until the named processes, by default all, are ready.

        One scheduler must serve, and the others must stand by.
        """
        deadline = time.monotonic() + _START_S
        for name in names or self._kinds():
            while not (
                await self._is_ready(await self._resolve(name))
                and (name != _SCHEDULER or await self._have_others_stood_by())
            ):
                for each in self._processes.values():
                    if each.exit_code != _EXIT_STALE_EPOCH:
                        each.check_runs()
                if time.monotonic() > deadline:
                    logs = "".join(each.log_tail(3) for each in self._processes.values())
                    raise BenchError(f"{name} is not ready after {_START_S:.0f} s\n{logs}")
                await asyncio.sleep(_POLL_S)

    def draw(
        self, chance: random.Random, hang_s: float, only: Collection[str] = ()
    ) -> Iterator[Fault]:
        """Draw faults endlessly; with `only`, leave out all other kinds.

        Of every three faults, one hits a worker, one a scheduler and one a router, or the link
        before the process. The first three are kills.
        """
        drawn = self._draw(chance, hang_s)
        return (fault for fault in drawn if not only or fault.kind in only)

    def _draw(self, chance: random.Random, hang_s: float) -> Iterator[Fault]:
        for number in itertools.count():
            for kind in chance.sample(("worker", "scheduler", "router"), 3):
                name = chance.choice([each for each in self._kinds() if each.startswith(kind)])
                what = chance.choice((What.KILLED, *What))
                if what is What.KILLED or number == 0:
                    yield Fault(What.KILLED, name, chance.choice((0.0, 0.0, 1.0)))
                else:
                    yield Fault(what, name, 0.0 if what is What.CUT else hang_s)

    async def befall(self, fault: Fault) -> None:
        """Inject a fault.

        Returns when the process or link is back, though perhaps not ready yet.
        """
        name = await self._resolve(fault.name)
        process, link = self._processes[name], self._links[name]
        match fault.what:
            case What.KILLED:
                async with _started_again(process):
                    await process.kill()
                    await asyncio.sleep(fault.seconds)
            case What.STOPPED:
                process.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.seconds)
                process.signal(signal.SIGCONT)
            case What.CUT:
                link.cut()
            case What.SILENT:
                await link.silence(fault.seconds)

    async def drain(self, name: str) -> None:
        """Drain a process, and start it again when it has ended."""
        process = self._processes[await self._resolve(name)]
        async with _started_again(process):
            await process.stop(_STOP_S)

    async def kill_all(self) -> None:
        """Kill all processes at the same time, and start them again."""
        for process in self._processes.values():
            process.signal(signal.SIGKILL)
        for process in self._processes.values():
            await process.kill()
            process.start()

    @property
    def scheduler_target(self) -> str:
        """Where operators find the first scheduler."""
        return self._targets(self._schedulers[:1])

    @property
    def urls(self) -> list[str]:
        """Where clients find the routers' HTTP."""
        return [self._processes[router].base_url for router in self.routers]

    async def metrics(self, name: str) -> Mapping[str, float]:
        """Map each metric's name to the sum of its samples.

        A name with a label, such as `quire_migrations_total{end="arrived"}`, is mapped to the sum
        of the samples that have the label.
        """
        body = await self._processes[await self._resolve(name)].get("/metrics")
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(body or ""):
            for sample in family.samples:
                labelled = (f'{sample.name}{{{key}="{at}"}}' for key, at in sample.labels.items())
                for key in (sample.name, *labelled):
                    sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    async def start(self) -> None:
        for link in self._links.values():
            await link.open()
        for process in self._processes.values():
            process.start()
        self._supervisor = asyncio.create_task(self._supervise(), name="supervisor")
        await self.wait_until_ready()

    async def close(self) -> None:
        """End everything, routers first."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        for name in sorted(self._processes, key=lambda name: name not in self.routers):
            await self._processes[name].stop(_STOP_S)
        for link in self._links.values():
            await link.close()

    def save_logs(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for log in self._directory.glob("*.log"):
            shutil.copy(log, directory)

    def _kinds(self) -> list[str]:
        """Return the names that faults draw from; "scheduler" stands for the serving one."""
        return [_SCHEDULER, *(name for name in self._processes if name not in self._schedulers)]

    async def _resolve(self, name: str) -> str:
        """Return a process's name; for `_SCHEDULER`, a ready scheduler's, or else the first's."""
        if name != _SCHEDULER:
            return name
        for each in self._schedulers:
            if await self._is_ready(each):
                return each
        return self._schedulers[0]

    def _add(self, name: str, module: str, *flags: str) -> None:
        """Add a process, and the link before it."""
        socket, port = self._directory / f"{name}.sock", next(self._ports)
        argv = ["-m", module, f"--uds={socket}", f"--http-port={port}", *flags]
        self._processes[name] = Process(name, argv, self._directory / f"{name}.log", port)
        self._links[name] = Link(self._directory / f"to-{name}.sock", socket)

    def _targets(self, names: list[str]) -> str:
        """Return the addresses of links, in the form of a flag."""
        return ",".join(f"unix:{self._directory}/to-{name}.sock" for name in names)

    async def _supervise(self) -> None:
        """Restart schedulers that ended because a newer one took over, as a supervisor would."""
        while True:
            for name in self._schedulers:
                if self._processes[name].exit_code == _EXIT_STALE_EPOCH:
                    self._processes[name].start()
            await asyncio.sleep(_SUPERVISE_S)

    async def _have_others_stood_by(self) -> bool:
        """Whether each scheduler except the serving one stands by."""
        serving = await self._resolve(_SCHEDULER)
        others = (self._processes[each] for each in self._schedulers if each != serving)
        return all('"standing by"' in each.log_tail(1) for each in others)

    async def _is_ready(self, name: str) -> bool:
        return await self._processes[name].get("/ready") is not None


@contextlib.asynccontextmanager
async def _started_again(process: Process) -> AsyncIterator[None]:
    """Start a process again after a `with` block that ends it, even if the block is cancelled."""
    try:
        yield
    finally:
        await process.kill()
        process.start()


@contextlib.asynccontextmanager
async def chaos_service(
    directory: Path,
    model: Path,
    num_blocks: int,
    *,
    has_standby: bool = False,
    worker_flags: Sequence[str] = ("--dtype=float32", "--host-kv-memory-gb=0.1"),
    roles: Sequence[str] = ("both", "both"),
    keeps_turns: bool = False,
    script: Path | None = None,
) -> AsyncIterator[ChaosService]:
    """Start the service and wait until it is ready; it ends with the block or this process."""
    service = ChaosService(
        directory,
        model,
        num_blocks,
        has_standby=has_standby,
        worker_flags=worker_flags,
        roles=roles,
        keeps_turns=keeps_turns,
        script=script,
    )
    try:
        await service.start()
        yield service
    finally:
        await service.close()

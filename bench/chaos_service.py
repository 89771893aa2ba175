"""The service that chaos befalls: its processes, the links between them, and what can fail."""

import asyncio
import contextlib
import itertools
import random
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from chaos_link import Link
from chaos_process import Process
from prometheus_client.parser import text_string_to_metric_families

from quire.cli.up import ports

_HOST = "127.0.0.1"
_POLL_S = 0.05
_STOP_S = 30.0
_START_S = 180.0
_NUM_ROUTERS = 2
_NUM_WORKERS = 2
_SCHEDULER = "scheduler"
"""In faults and questions: the one that serves, which of several it may be."""
_EXIT_STALE_EPOCH = 3
"""Of a scheduler: a newer one has taken over. Its supervisor starts it again."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill -9; the process is started again after `pause_s`."""

    process: str
    pause_s: float

    @property
    def kind(self) -> str:
        """For a table."""
        return f"{self.process.split('-')[0]} killed"


@dataclass(frozen=True, slots=True)
class Hang:
    """SIGSTOP, and SIGCONT after `seconds`."""

    process: str
    seconds: float

    @property
    def kind(self) -> str:
        """For a table."""
        return f"{self.process.split('-')[0]} stopped"


@dataclass(frozen=True, slots=True)
class Cut:
    """All connections of a link break."""

    link: str

    @property
    def kind(self) -> str:
        """For a table."""
        return f"{self.link.split('-')[0]} link cut"


@dataclass(frozen=True, slots=True)
class Silence:
    """A link passes nothing on for `seconds`, and then all that was held up."""

    link: str
    seconds: float

    @property
    def kind(self) -> str:
        """For a table."""
        return f"{self.link.split('-')[0]} link silent"


Fault: TypeAlias = Kill | Hang | Cut | Silence


class ChaosService:
    """Two routers, a scheduler and two workers, with a link before each gRPC port.

    With a standby there are two schedulers, of which one serves; who comes back stands by.
    """

    def __init__(self, directory: Path, model: Path, num_blocks: int, *, has_standby: bool) -> None:
        """`directory` is for sockets and logs; the device pools have `num_blocks` each."""
        self._directory = directory
        self._processes: dict[str, Process] = {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        workers = [f"worker-{i}" for i in range(_NUM_WORKERS)]
        self.routers = [f"router-{i}" for i in range(_NUM_ROUTERS)]
        for worker in workers:
            self._add(
                *(worker, "gpu_worker", "--device=cpu", "--dtype=float32", "--num-threads=1"),
                *(f"--model={model}", f"--num-blocks={num_blocks}", "--host-kv-memory-gb=0.1"),
                "--max-num-batched-tokens=512",
            )
        self._schedulers = ["scheduler-0", "scheduler-1"] if has_standby else ["scheduler-0"]
        for scheduler in self._schedulers:
            self._add(
                scheduler,
                "scheduler_svc",
                "--workers=" + ",".join(self._target(f"to-{worker}") for worker in workers),
                "--claim-s=5",
                *(("--standby",) if has_standby else ()),
            )
        self.links = {name: self._link(f"to-{name}", name) for name in self._schedulers}
        self.links |= {worker: self._link(f"to-{worker}", worker) for worker in workers}
        for router in self.routers:
            schedulers = ",".join(self._target(f"to-{name}") for name in self._schedulers)
            self._add(router, "router", f"--model={model}", f"--scheduler={schedulers}")
            self.links[router] = self._link(f"to-{router}", router)

    @property
    def targets(self) -> list[str]:
        """Where clients find the routers."""
        return [self._target(f"to-{router}") for router in self.routers]

    @property
    def processes(self) -> list[str]:
        """All of them by name."""
        return list(self._processes)

    def start(self, name: str) -> None:
        """Start a process that does not run; it is not ready yet."""
        self._processes[name].start()

    async def wait_until_ready(self, names: list[str] | None = None) -> None:
        """Wait for some processes, or all; a scheduler that ended as it was fenced starts anew.

        Of schedulers one is waited for: who stands by is not ready.
        """
        async with asyncio.timeout(_START_S):
            for name in names or self._kinds():
                while not await self._is_ready(await self._resolve(name)):
                    for each in self._schedulers if name == _SCHEDULER else [name]:
                        self._check(each)
                    await asyncio.sleep(_POLL_S)

    def draw(self, chance: random.Random, hang_s: float) -> Iterator[Fault]:
        """Make up faults without end: in each three, one of each kind of process or its link.

        The first three are kills.
        """
        for number in itertools.count():
            for kind in chance.sample(("worker", "scheduler", "router"), 3):
                name = chance.choice([each for each in self._kinds() if each.startswith(kind)])
                match chance.choice(("kill", "kill", "hang", "cut", "silence")):
                    case what if what == "kill" or number == 0:
                        yield Kill(name, chance.choice((0.0, 0.0, 1.0)))
                    case "hang":
                        yield Hang(name, hang_s)
                    case "cut":
                        yield Cut(name)
                    case _:
                        yield Silence(name, hang_s)

    async def befall(self, fault: Fault) -> None:
        """Let a fault happen; returns when what failed is there again, though not ready yet."""
        match fault:
            case Kill(name, pause_s):
                name = await self._resolve(name)
                await self._processes[name].kill()
                await asyncio.sleep(pause_s)
                self.start(name)
            case Hang(name, seconds):
                name = await self._resolve(name)
                self._processes[name].signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                self._processes[name].signal(signal.SIGCONT)
            case Cut(link):
                self.links[await self._resolve(link)].cut()
            case Silence(link, seconds):
                await self.links[await self._resolve(link)].silence(seconds)

    async def metrics(self, name: str) -> Mapping[str, float]:
        """Each metric's name to the sum of its samples."""
        body = await asyncio.to_thread(self._get, await self._resolve(name), "/metrics")
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(body or ""):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def close(self) -> None:
        """End everything, routers first."""
        for name in (*self.routers, *self.processes):
            await self._processes[name].stop(_STOP_S)
        for link in self.links.values():
            await link.close()

    def save_logs(self, directory: Path) -> None:
        """Copy all logs."""
        directory.mkdir(parents=True, exist_ok=True)
        for log in self._directory.glob("*.log"):
            shutil.copy(log, directory)

    # --- parts ----------------------------------------------------------------------------------

    def _kinds(self) -> list[str]:
        """All processes by name, but the schedulers as the one that serves."""
        return [_SCHEDULER, *(name for name in self.processes if name not in self._schedulers)]

    async def _resolve(self, name: str) -> str:
        """Give the process that is meant: of the schedulers the one that is ready, if one is."""
        if name != _SCHEDULER:
            return name
        for each in self._schedulers:
            if await self._is_ready(each):
                return each
        return self._schedulers[0]

    def _add(self, name: str, module: str, *flags: str) -> None:
        taken = [int(process.http.rsplit(":", 1)[1]) for process in self._processes.values()]
        port = ports.prefer(_HOST, 0, taken)
        own = [f"--uds={self._directory / name}.sock", f"--http-port={port}"]
        log = self._directory / f"{name}.log"
        http = ports.join(_HOST, port)
        self._processes[name] = Process(name, module, [*own, *flags], http, log)

    def _link(self, listen: str, target: str) -> Link:
        sockets = (self._directory / f"{name}.sock" for name in (listen, target))
        return Link(target, *sockets)

    def _target(self, name: str) -> str:
        return f"unix:{self._directory / name}.sock"

    def _check(self, name: str) -> None:
        process = self._processes[name]
        if process.exit_code is None:
            return
        if name not in self._schedulers or process.exit_code != _EXIT_STALE_EPOCH:
            log = process.log_tail()
            raise RuntimeError(f"{name} ended with {process.exit_code}; its log ends:\n{log}")
        self.start(name)

    async def _is_ready(self, name: str) -> bool:
        return await asyncio.to_thread(self._get, name, "/ready") is not None

    def _get(self, name: str, path: str) -> str | None:
        url = f"http://{self._processes[name].http}{path}"
        try:
            with self._opener.open(url, timeout=5) as response:
                return str(response.read().decode())
        except (urllib.error.URLError, OSError):
            return None


@contextlib.asynccontextmanager
async def chaos_service(
    directory: Path, model: Path, num_blocks: int, *, has_standby: bool = False
) -> AsyncIterator[ChaosService]:
    """Start the service and wait until it is ready; it ends with the block, or with us."""
    service = ChaosService(directory, model, num_blocks, has_standby=has_standby)
    try:
        for link in service.links.values():
            await link.open()
        for name in service.processes:
            service.start(name)
        await service.wait_until_ready()
        yield service
    finally:
        await service.close()

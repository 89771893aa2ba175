"""Starts what a benchmark measures, on this machine, and leaves nothing behind."""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path

from load import Workload

from quire.cli.commands.probe import wait_until_ready
from quire.cli.up import ports
from quire.cli.up.child import Child, ProcessSpec

_BENCH = Path(__file__).parent
_HOST = "127.0.0.1"
_LOG_LINES = 30
_STOP_S = 15.0
_WARM_UP = Workload(model="", num_prompts=4, input_len=128, output_len=8, seed=-1)


class Service:
    """Router, scheduler and worker, in processes of their own or in one."""

    def __init__(self, child: Child, socket: Path) -> None:
        """`child` runs them, with the router's gRPC at `socket`."""
        self.base_url = f"http://{child.spec.http_address}"
        self.grpc_target = f"unix:{socket}"
        self._child = child

    @property
    def pid(self) -> int:
        """The process under which all others are."""
        return self._child.pid

    async def wait_until_ready(self) -> None:
        """Raise RuntimeError with the end of the log if it does not start."""
        address = self._child.spec.http_address
        await wait_until_ready({"router": address}, lambda _: None, self._check)

    def _check(self) -> None:
        if self._child.exit_code is not None:
            log = "\n".join(self._child.log_tail(_LOG_LINES))
            raise RuntimeError(f"{self._child.spec.name} ended; its log ends:\n{log}")


class BareEngine:
    """The engine of `bare_engine.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """`process` runs it, with pipes for its standard input and output."""
        self._process = process

    async def wait_until_ready(self) -> None:
        """Wait for a first, small round; raises RuntimeError if it does not start."""
        await self.output_tok_s(_WARM_UP, concurrency=_WARM_UP.num_prompts)

    async def output_tok_s(self, workload: Workload, concurrency: int) -> float:
        """Run one round; raises RuntimeError if it ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message = json.dumps({**asdict(workload), "concurrency": concurrency})
        self._process.stdin.write(message.encode() + b"\n")
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"bare_engine.py ended with {await self._process.wait()}")
        tok_s: float = json.loads(answer)["output_tok_s"]
        return tok_s


@contextlib.asynccontextmanager
async def service(model: Path, worker_flags: Sequence[str]) -> AsyncIterator[Service]:
    """Start the three processes, by `quire up`; they end with the block, or with us."""
    up = ("-m", "quire.cli", "up")
    async with _service("quire up", up, model, worker_flags) as started:
        yield started


@contextlib.asynccontextmanager
async def one_service(model: Path, worker_flags: Sequence[str]) -> AsyncIterator[Service]:
    """Start the same service in one process; it ends with the block, or with us."""
    script = _BENCH / "one_service.py"
    async with _service(script.name, (str(script),), model, worker_flags) as started:
        yield started


@contextlib.asynccontextmanager
async def _service(
    name: str, program: Sequence[str], model: Path, flags: Sequence[str]
) -> AsyncIterator[Service]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
        directory = Path(temporary)
        http_port = ports.prefer(_HOST, 0, ())
        socket = directory / "grpc.sock"
        listen = ("--model", str(model), "--http-port", str(http_port), "--uds", str(socket))
        spec = ProcessSpec(
            name=name,
            argv=(sys.executable, *program, *listen, *flags),
            http_address=ports.join(_HOST, http_port),
        )
        child = await Child.start(spec, directory / "log")
        try:
            yield Service(child, socket)
        finally:
            child.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _STOP_S)
            child.kill()


@contextlib.asynccontextmanager
async def bare_engine(model: Path, worker_flags: Sequence[str]) -> AsyncIterator[BareEngine]:
    """Start the engine without a service; it ends with the block, or with us: its input ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(_BENCH / "bare_engine.py"), "--model", str(model), *worker_flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is for us
    )
    try:
        yield BareEngine(process)
    finally:
        await _kill(process)


async def make_model(directory: Path) -> None:
    """Write the default model of `make_model.py`, in a process that ends, with its torch."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(_BENCH / "make_model.py"), str(directory)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        if await process.wait():
            raise RuntimeError(f"make_model.py ended with {process.returncode}")
    finally:
        await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()

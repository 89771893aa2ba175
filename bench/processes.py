"""Starts what a benchmark measures, on this machine, and leaves nothing behind."""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from load import Workload

from quire.cli import ports
from quire.cli.child import Child, ProcessSpec
from quire.cli.probe import wait_until_ready

_BENCH = Path(__file__).parent
_READ_LIMIT_BYTES = 2**20
_STOP_S = 15.0


@dataclass(frozen=True, slots=True)
class Service:
    """Router, scheduler and worker, ready."""

    base_url: str
    grpc_target: str


class OneProcess:
    """The engine of `one_process.py`, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def output_tok_s(self, workload: Workload, concurrency: int) -> float:
        """Run one round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message = json.dumps({**asdict(workload), "concurrency": concurrency})
        self._process.stdin.write(message.encode() + b"\n")
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"one_process.py ended with {await self._process.wait()}")
        tok_s: float = json.loads(answer)["output_tok_s"]
        return tok_s


@contextlib.asynccontextmanager
async def service(
    model: Path, worker_flags: Sequence[str], report: Callable[[str], None]
) -> AsyncIterator[Service]:
    """Start the three processes by `quire up`, and stop them at the end.

    Raises RuntimeError with the end of the log if they do not start.
    """
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        directory = Path(name)
        http_port = ports.prefer("127.0.0.1", 0, ())
        socket = directory / "grpc.sock"
        up = ("--model", str(model), "--http-port", str(http_port), "--uds", str(socket))
        address = f"127.0.0.1:{http_port}"
        child = Child.start(
            ProcessSpec(
                name="quire up",
                argv=(sys.executable, "-m", "quire.cli", "up", *up, *worker_flags),
                http_address=address,
            ),
            directory / "up.log",
        )

        def check() -> None:
            if child.exit_code is not None:
                raise RuntimeError("quire up ended:\n" + "\n".join(child.log_tail(30)))

        try:
            await wait_until_ready({"router": address}, lambda _: None, check)
            report("the three processes are ready")
            yield Service(f"http://{address}", f"unix:{socket}")
        finally:
            child.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _STOP_S)
            child.kill()


@contextlib.asynccontextmanager
async def one_process(
    model: Path, worker_flags: Sequence[str], report: Callable[[str], None]
) -> AsyncIterator[OneProcess]:
    """Start the engine in one process; it ends with us, for its standard input does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(_BENCH / "one_process.py"), "--model", str(model), *worker_flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_READ_LIMIT_BYTES,
        start_new_session=True,
    )
    try:
        engine = OneProcess(process)
        await engine.output_tok_s(_WARM_UP, concurrency=_WARM_UP.num_prompts)
        report("the one process is ready")
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


_WARM_UP = Workload(model="", num_prompts=4, input_len=128, output_len=8, seed=-1)


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
        with contextlib.suppress(ProcessLookupError):
            process.kill()

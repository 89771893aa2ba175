"""The Shepherd Model Gateway as a process, in front of cells whose routers listen on TCP."""

import contextlib
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.child import START_S, eventually
from tests.e2e.service import Service

MODEL = Path(__file__).parents[2] / "models" / "quire-tiny-python"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Cell(Service):
    """A service with everything that gateways use, on TCP."""

    def __init__(self, directory: Path, model: Path, *, router: Sequence[str] = ()) -> None:
        self.port = free_port()
        super().__init__(
            directory,
            model,
            scheduler=["--kv-events"],
            router=["--vllm-engine", f"--grpc-port={self.port}", *router],
        )
        self._flags["router"] = [f for f in self._flags["router"] if not f.startswith("--uds=")]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


class Gateway:
    """The gateway; entering waits until it has found all cells."""

    def __init__(self, program: Path, log: Path, cells: Sequence[Cell]) -> None:
        self._log = log
        self._port, self._metrics_port = free_port(), free_port()
        self._num_cells = len(cells)
        self._command = [
            *(str(program), "launch", "--host=127.0.0.1", f"--port={self._port}"),
            *("--policy=cache_aware", "--log-level=info", "--health-check-interval-secs=1"),
            *("--prometheus-host=127.0.0.1", f"--prometheus-port={self._metrics_port}"),
            *("--worker-urls", *(f"grpc://{cell.target}" for cell in cells)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
                start_new_session=True,
            )
        try:
            eventually(self._is_ready, "the gateway has found the cells", START_S)
        except BaseException as error:
            error.add_note(self._log.read_text(errors="replace")[-5000:])
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics") as response:
            families = text_string_to_metric_families(response.read().decode())
            return sum(s.value for f in families for s in f.samples if s.name == name)

    def _is_ready(self) -> bool | None:
        assert self._process is not None
        assert self._process.poll() is None, "the gateway has ended"
        try:
            with urllib.request.urlopen(f"{self.url}/readiness", timeout=5) as response:
                text = response.read().decode()
        except (urllib.error.URLError, OSError):
            return None
        return f'"healthy_workers":{self._num_cells}' in text or None

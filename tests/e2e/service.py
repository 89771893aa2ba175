"""A whole service for a test: worker, scheduler and router as processes of their own."""

import contextlib
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from prometheus_client.parser import text_string_to_metric_families

from quire.v1 import common_pb2, inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import START_S, Child, eventually

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
)

JSON_TYPE = {"Content-Type": "application/json"}


class Service:
    """Three processes that talk over Unix sockets in one directory.

    Entering starts them and waits until the router is ready; leaving stops them and checks that
    each has ended cleanly. The scheduler connects to `worker_uds`, where a test may put a proxy
    before the worker.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        worker: Sequence[str] = (),
        scheduler: Sequence[str] = (),
        router: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        worker_uds: Path | None = None,
        script: Path | None = None,
    ) -> None:
        """`worker`, `scheduler` and `router` are flags added to those of every service of the
        tests. With `script`, the worker is a simulated one that outputs the script."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model = model.name
        self.uds = {name: directory / f"{name}.sock" for name in ("worker", "scheduler", "router")}
        worker_uds = worker_uds or self.uds["worker"]
        self._flags = {
            "worker": [
                *(f"--uds={self.uds['worker']}", "--http-port=0", f"--model={model}"),
                *(
                    ("--device=cpu", "--dtype=float32", "--num-threads=1")
                    if script is None
                    else (f"--script={script}",)
                ),
                *worker,
            ],
            "scheduler": [
                *(f"--uds={self.uds['scheduler']}", "--http-port=0"),
                f"--workers=unix:{worker_uds}",
                *scheduler,
            ],
            "router": [
                *(f"--uds={self.uds['router']}", "--http-port=0", f"--model={model}"),
                f"--scheduler=unix:{self.uds['scheduler']}",
                *router,
            ],
        }
        env = env or {}
        module = "gpu_worker" if script is None else "sim_worker"
        self.worker = Child(module, directory / "worker.log", env)
        self.scheduler = Child("scheduler_svc", directory / "scheduler.log", env)
        self.router = Child("router", directory / "router.log", env)
        self._scheduler_flags: tuple[str, ...] = ()
        self._channel: grpc.Channel | None = None

    # --- start and stop -------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start_worker()
            self.start_scheduler()
            self.start_router()
            self.wait_until_ready()
        except BaseException:
            for child in self._children:
                child.kill()
            raise
        self._channel = grpc.insecure_channel(self.target, _CHANNEL_OPTIONS)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._channel is not None:
            self._channel.close()
        try:
            for child in self._children:
                child.stop()
        finally:
            for child in self._children:
                child.kill()

    def start_worker(self) -> None:
        self.worker.start(self._flags["worker"])

    def start_scheduler(self, *more_flags: str) -> None:
        self._scheduler_flags = more_flags
        self.scheduler.start(self.scheduler_flags(*more_flags))

    def scheduler_flags(self, *more_flags: str) -> list[str]:
        """The flags of a scheduler of this service."""
        return [*self._flags["scheduler"], *more_flags]

    def start_router(self) -> None:
        self.router.start(self._flags["router"])

    def use_scheduler(self, *more_flags: str) -> None:
        """Restarts the idle service's scheduler with the usual flags and these."""
        if more_flags != self._scheduler_flags:
            self.scheduler.stop()
            self.wait_until_not_ready()
            self.start_scheduler(*more_flags)
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        def is_ready() -> bool | None:
            for child in self._children:
                child.check_alive()
            return self.get_json(self.router, "/ready")[0] == 200 or None

        try:
            eventually(is_ready, "the router is ready", START_S)
        except AssertionError as error:
            logs = "".join(f"--- {child.module}\n{child.log}" for child in self._children)
            raise AssertionError(f"{error}\n{logs}") from None

    def wait_until_not_ready(self) -> None:
        """Waits until the router has noticed that its scheduler or the worker is lost."""
        eventually(
            lambda: self.get_json(self.router, "/ready")[0] == 503 or None, "the router notices"
        )

    @contextlib.contextmanager
    def holding_steps(self, router: Child, num_requests: int) -> Iterator[None]:
        """Holds back all steps until `num_requests` are live at a router; the block starts them.

        So the requests run together, even if the last one arrives much later than the first.
        """
        self.worker.signal(signal.SIGSTOP)
        try:
            yield
            eventually(
                lambda: self.metrics(router)["quire_num_requests_live"] >= num_requests or None,
                f"{num_requests} requests are live",
            )
        finally:
            self.worker.signal(signal.SIGCONT)

    @property
    def _children(self) -> tuple[Child, Child, Child]:
        return self.router, self.scheduler, self.worker

    # --- its APIs -------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        """The router's gRPC target."""
        return f"unix:{self.uds['router']}"

    @property
    def url(self) -> str:
        """Base URL of HTTP."""
        return f"http://{self.router.http}"

    @property
    def channel(self) -> grpc.Channel:
        """One channel for all tests of the service."""
        assert self._channel is not None
        return self._channel

    @property
    def stub(self) -> InferenceServiceStub:
        """For synchronous tests."""
        return InferenceServiceStub(self.channel)

    def aio_channel(self) -> grpc.aio.Channel:
        """A new channel, to be used with `async with`."""
        return grpc.aio.insecure_channel(self.target, _CHANNEL_OPTIONS)

    # --- load and metrics -----------------------------------------------------------------------

    def load(self) -> common_pb2.Load:
        return self.stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=10).load

    def wait_until_idle(self, within_s: float = START_S) -> common_pb2.Load:
        """Waits until nothing runs or waits and no block is held; returns the load."""

        def idle() -> common_pb2.Load | None:
            try:
                load = self.load()
            except grpc.RpcError as error:
                # The router has just lost a scheduler, and may connect to the next one.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return None
            return load if is_idle(load) else None

        try:
            return eventually(idle, "the service is idle", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\nload:\n{self.load()}") from None

    def get_json(self, child: Child, path: str) -> tuple[int, Any]:
        """Status and body of a GET."""
        status, body = self._get(child, path)
        return status, json.loads(body)

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The router's answer to a POST; raises `HTTPError` unless it is a 200."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), JSON_TYPE)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def metrics(self, child: Child) -> dict[str, float]:
        """Each metric's name to the sum of its samples over all labels."""
        status, body = self._get(child, "/metrics")
        assert status == 200
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def _get(self, child: Child, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://{child.http}{path}", timeout=10) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def is_idle(load: common_pb2.Load) -> bool:
    """Whether no sequence is live and none holds a block."""
    return (
        load.num_requests_running == load.num_requests_waiting == 0
        and load.num_free_blocks + load.num_cached_blocks + load.num_pinned_blocks
        == load.num_blocks
    )

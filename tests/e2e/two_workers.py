"""A service with two workers, and a stream to read while its request moves between them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc

from quire.cli.__main__ import main as quire
from quire.client import Client
from quire.v1 import scheduler_pb2
from quire.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.e2e.child import START_S, Child, eventually
from tests.e2e.generation import Result
from tests.e2e.service import Service


class TwoWorkers(Service):
    """A service with a second worker beside the first."""

    def __init__(self, directory: Path, model: Path, *, worker: tuple[str, ...], scheduler=()):
        uds = {name: directory / f"{name}.sock" for name in ("worker", "other")}
        self.targets = tuple(f"unix:{path}" for path in uds.values())
        flags = [*scheduler, f"--workers={','.join(self.targets)}"]
        super().__init__(directory, model, worker=worker, scheduler=flags)
        self._flags["scheduler"] = [
            flag for flag in self._flags["scheduler"] if flag != f"--workers={self.targets[0]}"
        ]
        first = self._flags["worker"]
        self._other_flags = [f"--uds={uds['other']}", *first[1:], "--worker-id=other"]
        self.other = Child("gpu_worker", directory / "other.log", {})

    def start_worker(self) -> None:
        super().start_worker()
        self.other.start(self._other_flags)

    def start_first_again(self) -> None:
        super().start_worker()
        self.wait_until_both_are_attached()

    @property
    def _children(self):
        return (*super()._children, self.other)

    def wait_until_both_are_attached(self) -> None:
        eventually(
            lambda: self.load().num_workers == 2 or None, "both workers are attached", START_S
        )

    @contextlib.contextmanager
    def scheduler_stub(self) -> Iterator[SchedulerServiceStub]:
        with grpc.insecure_channel(f"unix:{self.uds['scheduler']}") as channel:
            yield SchedulerServiceStub(channel)

    def migrate(self, request_id: str, worker: str) -> scheduler_pb2.MigrateResponse:
        with self.scheduler_stub() as stub:
            return stub.Migrate(
                scheduler_pb2.MigrateRequest(request_id=request_id, worker=worker), timeout=30
            )

    def run(self, *argv: str) -> int:
        """Runs `quire` with arguments, for this scheduler; its exit code."""
        return quire([*argv, "--scheduler", f"unix:{self.uds['scheduler']}"])

    def kv(self, worker: str, **query):
        with Client(self.target) as client:
            (described,) = client.describe_kv(worker=worker, timeout_s=10, **query)
        return described

    def where_is(self, request_id: str) -> str | None:
        """The worker at which a request runs."""
        return next((each for each in self.targets if self.is_at(each, request_id)), None)

    def is_at(self, target: str, request_id: str) -> bool:
        return any(seq.request_id == request_id for seq in self.kv(target).sequences)

    def other_than(self, target: str) -> str:
        return next(other for other in self.targets if other != target)

    def child(self, target: str) -> Child:
        return self.worker if target == self.targets[0] else self.other


class Stream:
    """A stream that a test reads piece by piece."""

    def __init__(self, service: Service, request) -> None:
        self._events = service.stub.Generate(request)
        self.result = Result()

    def read_until(self, num_tokens: int) -> None:
        for event in self._events:
            self.result.add(event)
            if len(self.result.token_ids.get(0, ())) >= num_tokens:
                return
        raise AssertionError("it ended early")

    def read_first(self, num_tokens: int) -> list[list[int]]:
        """The first tokens of each output; then cancels."""
        by_index = self.result.token_ids
        for event in self._events:
            self.result.add(event)
            if all(len(each) >= num_tokens for each in by_index.values()):
                self.cancel()
                return [by_index[index][:num_tokens] for index in sorted(by_index)]
        raise AssertionError("it ended early")

    def cancel(self) -> None:
        self._events.cancel()

    def read_to_end(self) -> list[list[int]]:
        for event in self._events:
            self.result.add(event)
        return self.result.outputs

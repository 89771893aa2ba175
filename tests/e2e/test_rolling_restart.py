"""All processes are replaced under load, one after another; no call fails."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contract.errors import QuireError
from quire.client import Client, OutputDelta, SamplingParams
from tests.e2e.child import START_S, Child, eventually
from tests.e2e.service import Service, is_idle

NUM_CALLERS = 4
NUM_TOKENS = 250
SAMPLING = SamplingParams(temperature=0.9, max_tokens=NUM_TOKENS, ignore_eos=True, seed=5)
PROMPTS = [[7 + caller] * (30 + caller) for caller in range(NUM_CALLERS)]


class Twofold(Service):
    """A service with two simulated workers, and two routers with the same scheduler."""

    def __init__(self, directory: Path, model: Path) -> None:
        uds = {name: directory / f"{name}.sock" for name in ("worker", "worker2", "router2")}
        super().__init__(
            directory,
            model,
            scheduler=(f"--workers=unix:{uds['worker2']}",),
            router=("--drain-s=0.3",),
        )
        self._flags["worker"] = [f"--uds={uds['worker']}", "--http-port=0", f"--model={model}"]
        self.worker = Child("sim_worker", directory / "worker.log", {})
        self.worker2 = Child("sim_worker", directory / "worker2.log", {})
        self.router2 = Child("router", directory / "router2.log", {})
        self._more_flags = {
            self.worker2: [f"--uds={uds['worker2']}", *self._flags["worker"][1:]],
            self.router2: [f"--uds={uds['router2']}", *self._flags["router"][1:]],
        }
        self.targets = [self.target, f"unix:{uds['router2']}"]

    def start_worker(self) -> None:
        super().start_worker()
        self.worker2.start(self._more_flags[self.worker2])

    def start_router(self) -> None:
        super().start_router()
        self.router2.start(self._more_flags[self.router2])

    @property
    def _children(self):
        return (self.router2, *super()._children, self.worker2)

    def restart(self, child: Child) -> None:
        """Drains it, starts it again, and waits until it is ready."""
        child.stop()
        names = {self.router: "router", self.scheduler: "scheduler", self.worker: "worker"}
        child.start(self._flags[names[child]])
        eventually(lambda: self._is_ready(child) or None, f"{child.module} is ready", START_S)

    def _is_ready(self, child: Child) -> bool:
        child.check_alive()
        return self.get_json(child, "/ready")[0] == 200


class Caller:
    """Makes one call after another until it is stopped, and records the results."""

    def __init__(self, service: Twofold, index: int, stop: threading.Event) -> None:
        self.outputs: list[list[int]] = []
        self.errors: list[QuireError] = []
        self.num_tokens = 0
        self._service, self._index, self._stop = service, index, stop

    def run(self) -> None:
        targets = self._service.targets
        with Client(targets if self._index % 2 else targets[::-1]) as client:
            while not self._stop.is_set():
                try:
                    self.outputs.append(self._call(client))
                except QuireError as error:
                    self.errors.append(error)

    def _call(self, client: Client) -> list[int]:
        token_ids: list[int] = []
        prompt = PROMPTS[self._index]
        for event in client.generate(prompt, SAMPLING, timeout_s=100, resumable=True):
            if isinstance(event, OutputDelta):
                assert event.token_offset == len(token_ids), "a gap or a repeat"
                token_ids += event.token_ids
                self.num_tokens += len(event.token_ids)
        return token_ids


@pytest.fixture(scope="module")
def twofold(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[Twofold]:
    with Twofold(run_dir(), long_llama) as service:
        eventually(lambda: service.load().num_workers == 2 or None, "both workers", START_S)
        yield service


def test_a_process_of_each_kind_is_restarted_under_load_and_no_call_fails(twofold: Twofold):
    with Client(twofold.target) as client:
        expected = [client.generate_once(prompt, SAMPLING).outputs[0] for prompt in PROMPTS]
    stop = threading.Event()
    callers = [Caller(twofold, index, stop) for index in range(NUM_CALLERS)]
    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        runs = [pool.submit(caller.run) for caller in callers]
        try:
            for child in (twofold.worker, twofold.scheduler, twofold.router):
                _wait_for_progress(callers)
                twofold.restart(child)
        finally:
            stop.set()
        for run in runs:
            run.result(100)
    assert not list(itertools.chain(*(caller.errors for caller in callers)))
    for caller, output in zip(callers, expected, strict=True):
        assert caller.outputs
        assert all(token_ids == list(output.token_ids) for token_ids in caller.outputs)
    eventually(lambda: is_idle(twofold.load()) or None, "nothing is left behind")


def _wait_for_progress(callers: list[Caller]) -> None:
    before = [caller.num_tokens for caller in callers]
    eventually(
        lambda: all(c.num_tokens > n + 20 for c, n in zip(callers, before, strict=True)) or None,
        "every call goes on",
        60,
    )

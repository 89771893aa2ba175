"""Dynamo's own index of KV, which reads the events of a cell without etcd or NATS.

`make dynamo-test` installs Dynamo's runtime (from the package index) and runs these tests.
"""

import contextlib
import itertools
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dynamo.installed import dynamo_python
from tests.e2e.child import START_S, eventually
from tests.e2e.generation import generate_request, read
from tests.e2e.service import Service
from tests.smg.gateway import free_port

pytestmark = [pytest.mark.dynamo, pytest.mark.timeout(600)]
MODEL = Path(__file__).parents[2] / "models" / "quire-tiny-python"
BLOCK_SIZE = 16
NUM_TOKENS = 100
WHOLE_BLOCKS = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE


class Index:
    """The process `dynamo.indexer`, and its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def call(self, path: str, body: dict[str, Any] | None = None) -> bytes | None:
        """Return the answer; None: it does not listen yet, or does not know the model."""
        request = urllib.request.Request(
            f"{self._url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return bytes(response.read())
        except (urllib.error.HTTPError, ConnectionError, urllib.error.URLError):
            return None

    def num_matched(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt the cell has, as the index knows."""
        answer = self.call("/query", {"token_ids": prompt, "model_name": MODEL.name})
        return 0 if answer is None else json.loads(answer)["scores"].get("1", {}).get("0", 0)


@contextlib.contextmanager
def running_index(python: str, log: Path) -> Iterator[Index]:
    port = free_port()
    command = [python, "-m", "dynamo.indexer", f"--block-size={BLOCK_SIZE}", f"--port={port}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        index = Index(port)
        eventually(lambda: index.call("/health") is not None or None, "it listens", START_S)
        yield index
    finally:
        process.kill()
        process.wait()


def ask(service: Service, prompt: list[int]) -> None:
    read(service.stub.Generate(generate_request(prompt, max_tokens=2, ignore_eos=True)))


def test_the_index_finds_prompts_also_after_a_scheduler_was_killed(tmp_path):
    python = dynamo_python()
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    flags = ["--kv-events", f"--kv-events-zmq={events}", f"--kv-events-replay={replay}"]
    worker = ["--num-blocks=1024"]
    first, second, third = ([start + i for i in range(NUM_TOKENS)] for start in (5, 150, 300))
    with (
        running_index(python, tmp_path / "indexer.log") as index,
        Service(tmp_path / "cell", MODEL, worker=worker, scheduler=flags) as cell,
    ):
        ask(cell, first)  # before the index subscribes; it asks for a replay
        engine = {"instance_id": 1, "model_name": MODEL.name, "block_size": BLOCK_SIZE}
        assert index.call("/register", {**engine, "endpoint": events, "replay_endpoint": replay})

        def knows(prompt: list[int]) -> None:
            eventually(
                lambda: index.num_matched(prompt) == WHOLE_BLOCKS or None, "the index knows it"
            )

        ask(cell, second)
        knows(first)
        knows(second)
        assert index.num_matched(third) == 0
        cell.scheduler.kill()
        cell.wait_until_not_ready()  # new requests are refused until the next scheduler is there
        cell.start_scheduler()
        cell.wait_until_ready()
        ask(cell, third)

        def knows_third() -> bool | None:
            """It may have missed the event while it reconnected; the next one's number says so."""
            ask(cell, [next(fresh)] * (BLOCK_SIZE + 1))
            return index.num_matched(third) == WHOLE_BLOCKS or None

        fresh = itertools.count(10)
        eventually(knows_third, "the index knows it")

"""Two routers share the ports of HTTP and gRPC; one leaves while calls come."""

import http.client
import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from quire.cli.up.layout import SHIPPED_MODEL
from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import Child, eventually
from tests.e2e.service import JSON_TYPE, Service

pytestmark = pytest.mark.e2e

POST = ("POST", "/v1/completions")


class Shared(Service):
    """A simulated worker, a scheduler, and two routers on the same ports."""

    def __init__(self, directory: Path) -> None:
        self.http_port, self.grpc_port = _free_port(), _free_port()
        super().__init__(directory, SHIPPED_MODEL)
        self._flags["worker"] = [*self._flags["worker"][:2], f"--model={SHIPPED_MODEL}"]
        self.worker = Child("sim_worker", directory / "worker.log", {})
        self._flags["router"][0] = f"--grpc-port={self.grpc_port}"
        self._flags["router"].append(f"--shared-http-port={self.http_port}")
        self.router2 = Child("router", directory / "router2.log", {})
        self.routers = self.router, self.router2

    def start_router(self) -> None:
        super().start_router()
        self.router2.start(self._flags["router"])

    def wait_until_ready(self) -> None:
        super().wait_until_ready()
        eventually(
            lambda: self.get_json(self.router2, "/ready")[0] == 200 or None, "both are ready"
        )

    @property
    def _children(self):
        return (self.router2, *super()._children)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def complete(self) -> None:
        """Makes a call on a connection of its own to the shared port."""
        client = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=30)
        client.request(*POST, json.dumps({"prompt": "x", "max_tokens": 1}), JSON_TYPE)
        assert client.getresponse().status == 200
        client.close()

    def list_models(self) -> None:
        """Makes a call on a gRPC connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.target, options) as channel:
            InferenceServiceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def shared(run_dir: Callable[[], Path]) -> Iterator[Shared]:
    with Shared(run_dir()) as service:
        yield service


def test_each_router_gets_connections_and_one_that_drains_leaves_them_to_the_other(shared):
    def num_served(router):
        return shared.metrics(router).get("quire_request_success_total", 0.0)

    def both_serve():
        shared.complete()
        return all(map(num_served, shared.routers)) or None

    eventually(both_serve, "both have answered calls")
    leaving, staying = shared.routers
    stream = http.client.HTTPConnection(leaving.http, timeout=60)
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    stream.request(*POST, json.dumps(body), JSON_TYPE)
    response = stream.getresponse()
    assert response.readline().startswith(b"data: ")
    leaving.signal(signal.SIGTERM)
    eventually(lambda: "draining" in leaving.log or None, "it drains")
    before = num_served(staying)
    for _ in range(20):
        shared.complete()
        shared.list_models()
    assert num_served(staying) == before + 20
    assert response.read().endswith(b"data: [DONE]\n\n"), "live streams end well"
    leaving.wait()

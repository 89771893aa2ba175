"""A service with API keys whose processes call each other over TCP with mutual TLS."""

import json
import ssl
import urllib.error
import urllib.request
from contextlib import ExitStack

import grpc
import pytest

from contract.errors import UnauthenticatedError, UnavailableError
from quire.cli.commands.inference.generate import main as generate
from quire.cli.commands.live.defragment import main as defragment
from quire.cli.up.layout import SHIPPED_MODEL
from quire.client import Client, ClientTls, SamplingParams
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.peers.channel import open_blocking_channel
from tests.certificates import Authority
from tests.e2e.child import START_S, Child, eventually

pytestmark = pytest.mark.e2e

ALICE, BOB = "sk-alice", "sk-bob"
KEYS = f"""
keys = [{{key = "{ALICE}", tenant = "alice"}}, {{key = "{BOB}", tenant = "bob"}}]
"""


class Service:
    def __init__(self, folder, files, stack):
        self.files = files
        self.children = {
            module: Child(module, folder / f"{module}.log", {})
            for module in ("sim_worker", "scheduler_svc", "router")
        }
        for child in self.children.values():
            stack.callback(child.kill)
        self.worker = self.start("sim_worker", "--grpc-port=0", f"--model={SHIPPED_MODEL}")
        self.scheduler = self.start("scheduler_svc", "--grpc-port=0", f"--workers={self.worker}")
        keys = folder / "keys.toml"
        keys.write_text(KEYS)
        self.router = self.start(
            "router",
            *("--grpc-port=0", f"--model={SHIPPED_MODEL}", f"--scheduler={self.scheduler}"),
            f"--api-keys-file={keys}",
        )
        with self.client(ALICE) as client:
            eventually(lambda: self.models(client), "the router is ready", START_S)

    def start(self, module, *flags):
        """Starts a process, and returns its gRPC target."""
        child = self.children[module]
        child.start(["--http-port=0", *flags, *self.files.flags()])

        def find():
            child.check_alive()
            lines = [json.loads(line) for line in child.log.splitlines() if '"listening"' in line]
            return lines[0]["grpc"] if lines else None

        return eventually(find, f"{module} listens", START_S)

    def models(self, client):
        for child in self.children.values():
            child.check_alive()
        try:
            return client.models() or None
        except UnavailableError:
            return None

    @property
    def tls(self):
        return ClientTls(self.files.ca, self.files.cert, self.files.key)

    def client(self, key):
        return Client(self.router, api_key=key, tls=self.tls)

    def link_flags(self):
        files = self.files
        return [f"--tls-ca={files.ca}", f"--tls-cert={files.cert}", f"--tls-key={files.key}"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security")
    files = Authority(folder / "ca").issue("process")
    with ExitStack() as stack:
        service = Service(folder, files, stack)
        yield service
        for module in ("router", "scheduler_svc", "sim_worker"):
            service.children[module].stop()
        logs = "".join(child.log for child in service.children.values())
        assert ALICE not in logs
        assert BOB not in logs


def test_completion_over_grpc(service):
    with service.client(ALICE) as client:
        completion = client.generate_once("def add(", SamplingParams(max_tokens=4, ignore_eos=True))
    assert completion.usage.completion_tokens == 4


def test_completion_over_http(service):
    context = ssl.create_default_context(cafile=service.files.ca)
    context.load_cert_chain(service.files.cert, service.files.key)
    body = {"model": SHIPPED_MODEL.name, "prompt": "def add(", "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"https://{service.children['router'].http}/v1/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {ALICE}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30, context=context) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 4
    request.remove_header("Authorization")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30, context=context)
    assert refused.value.code == 401


def test_commands_are_clients_with_certificates_too(service, monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_API_KEY", ALICE)
    flags = ["--target", service.router, *service.link_flags(), "--max-tokens", "4"]
    assert generate(["def add(", *flags]) == 0
    assert capsys.readouterr().out.strip()
    assert defragment(["--scheduler", service.scheduler, *service.link_flags()]) == 0
    assert "blocks moved" in capsys.readouterr().out


def test_one_tenant_does_not_find_what_another_has_in_the_prefix_cache(service):
    prompt = list(range(100, 164))
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    cached = []
    for key in (ALICE, ALICE, BOB, BOB):
        with service.client(key) as client:
            cached.append(client.generate_once(prompt, sampling).usage.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_router_wants_a_key_besides_the_certificate(service):
    with service.client("") as client, pytest.raises(UnauthenticatedError):
        client.models()


@pytest.mark.parametrize("tls", ["none", "no certificate"])
def test_a_process_refuses_callers_without_a_certificate(service, tls):
    tls = None if tls == "none" else ClientTls(service.files.ca)
    calls = {
        service.worker: lambda channel: worker_pb2_grpc.WorkerServiceStub(channel).Attach(
            worker_pb2.AttachRequest(epoch=2**63), timeout=10
        ),
        service.scheduler: lambda channel: scheduler_pb2_grpc.SchedulerServiceStub(
            channel
        ).Defragment(scheduler_pb2.DefragmentRequest(), timeout=10),
    }
    for target, call in calls.items():
        with open_blocking_channel(target, tls=tls) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                call(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with service.client(ALICE) as client:
        assert client.load().num_workers == 1, "the scheduler still has its worker"

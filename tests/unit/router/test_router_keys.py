"""Attempts to get in: no key, a wrong one, another tenant's name, requests, KV and prefix cache."""

import asyncio
import contextlib
import hashlib
import itertools
import logging

import aiohttp
import grpc
import grpc.aio
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_fake_scheduler import LENGTH, FakeScheduler
from yarl import URL

from quire.client import AsyncClient
from quire.types import SamplingParams
from quire.v1 import inference_pb2, inference_pb2_grpc
from router.api_keys import ApiKeysError, read_keys_file
from router.app import run_router
from router.settings import RouterSettings
from rpc import logs
from rpc.channel import open_channel
from rpc.settings import parse_settings

pytestmark = pytest.mark.timeout(20)

OPERATOR, ALICE, ALICE_2, BOB = "sk-operator", "sk-alice", "sk-alice-2", "sk-bob"

KEYS = f"""
[[keys]]
key = "{ALICE}"
tenant = "alice"

[[keys]]
sha256 = "{hashlib.sha256(ALICE_2.encode()).hexdigest()}"
tenant = "alice"

[[keys]]
key = "{BOB}"
tenant = "bob"

[tenants.bob]
max_concurrent_requests = 1
max_tokens_in_flight = 40
"""


class Router:
    def __init__(self, channel, http, scheduler):
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.channel = channel
        self.http = http
        self.scheduler = scheduler

    def generate(self, key, *metadata, **fields):
        request = inference_pb2.GenerateRequest(text="hello", **fields)
        return self.stub.Generate(request, metadata=(*bearer(key), *metadata))

    async def submitted(self, key, *metadata, **fields):
        """What the scheduler is told of a call."""
        call = self.generate(key, *metadata, **fields)
        return call, await self.scheduler.submits.get()

    async def finish(self, submit):
        await self.scheduler.step(
            {submit.first_seq_key: [70]},
            finished={submit.first_seq_key: LENGTH},
            admitted={submit.first_seq_key: 0},
        )


def bearer(key):
    return () if key is None else (("authorization", f"Bearer {key}"),)


@pytest.fixture
def settings(model_dir, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return RouterSettings(
        model=model_dir,
        served_model_name="tiny",
        scheduler=(f"unix:{tmp_path / 's'}",),
        uds=tmp_path / "r",
        http_port=0,
        drain_s=5,
        api_key=(OPERATOR,),
        api_keys_file=file,
    )


@contextlib.asynccontextmanager
async def running(settings, tmp_path):
    scheduler = FakeScheduler(tmp_path / "s")
    await scheduler.start()
    stop = asyncio.Event()
    addresses = asyncio.get_running_loop().create_future()

    async def on_started(bound):
        addresses.set_result(bound)

    task = asyncio.create_task(run_router(settings, stop, on_started=on_started))
    bound = await addresses
    async with (
        open_channel(f"unix:{settings.uds}") as channel,
        aiohttp.ClientSession(f"http://{bound.http}") as http,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for response in watch:  # health needs no key
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
        yield Router(channel, http, scheduler)
    stop.set()
    await task
    await scheduler.stop()


@pytest.fixture
async def router(settings, tmp_path):
    async with running(settings, tmp_path) as router:
        yield router


async def failure(call):
    stream = isinstance(call, grpc.aio.UnaryStreamCall)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(call) if stream else call)
    return caught.value


async def read_all(call):
    async for _ in call:
        pass


CALLS = {
    "Generate": inference_pb2.GenerateRequest(text="hello"),
    "GenerateOnce": inference_pb2.GenerateOnceRequest(
        request=inference_pb2.GenerateRequest(text="hello")
    ),
    "Tokenize": inference_pb2.TokenizeRequest(text="hello"),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[1]),
    "ListModels": inference_pb2.ListModelsRequest(),
    "GetLoad": inference_pb2.GetLoadRequest(),
    "DescribeKv": inference_pb2.DescribeKvRequest(),
}
WRONG = [
    (),
    bearer("sk-wrong"),
    bearer(""),
    (("authorization", ALICE),),
    (("authorization", f"Basic {ALICE}"),),
    bearer(hashlib.sha256(ALICE_2.encode()).hexdigest()),
    (*bearer(ALICE), *bearer("sk-wrong")),
    bearer(ALICE.upper()),
    bearer(ALICE[:-1]),
]


def test_every_call_is_tried():
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
    assert {method.name for method in methods} >= set(CALLS)


async def test_no_call_gets_in_without_a_right_key(router):
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods
    for method in methods:  # those that this test has no request for, too
        request = CALLS.get(method.name, b"")
        call = router.channel.unary_stream(
            f"/quire.v1.InferenceService/{method.name}",
            request_serializer=lambda it: it if isinstance(it, bytes) else it.SerializeToString(),
        )
        for metadata in WRONG:
            error = await failure(call(request, metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, (method.name, metadata)
    assert router.scheduler.submits.empty()


async def test_health_and_reflection_need_no_key(router):
    stub = health_pb2_grpc.HealthStub(router.channel)
    assert await stub.Check(health_pb2.HealthCheckRequest())
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    assert (await call.read()).list_services_response.service


async def test_no_http_request_gets_in_without_a_right_key(router):
    paths = ("/v1/completions", "/v1/models", "/v1/nothing", "/nothing")
    headers = (None, "Bearer sk-wrong", ALICE, "Bearer", f"Basic {ALICE}")
    for path, header, method in itertools.product(paths, headers, ("GET", "POST")):
        sent = {} if header is None else {"Authorization": header}
        async with router.http.request(method, path, headers=sent, data=b"{") as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"]["type"] == "authentication_error"


async def test_http_probes_need_no_key(router):
    for path in ("/health", "/ready", "/metrics"):
        async with router.http.get(path) as response:
            assert response.status == 200


async def test_right_keys_get_in_by_either_face(router):
    for key, tenant in {OPERATOR: "", ALICE: "alice", ALICE_2: "alice", BOB: "bob"}.items():
        _, submit = await router.submitted(key, sampling={"max_tokens": 4})
        assert submit.tenant == tenant
        await router.finish(submit)
        headers = {"Authorization": f"bearer {key}"}
        async with router.http.get("/v1/models", headers=headers) as response:
            assert response.status == 200


async def test_our_own_client_sends_its_key(router, settings):
    async with AsyncClient(f"unix:{settings.uds}", api_key=ALICE) as client:
        assert await client.models()
        once = asyncio.create_task(client.generate_once("hi", SamplingParams(max_tokens=4)))
        submit = await router.scheduler.submits.get()
        assert submit.tenant == "alice"
        await router.finish(submit)
        assert (await once).usage.completion_tokens == 1


async def test_a_key_does_not_speak_for_another_tenant(router):
    error = await failure(router.generate(BOB, ("x-quire-tenant", "alice")))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    headers = {"Authorization": f"Bearer {BOB}", "x-quire-tenant": "alice"}
    body = {"model": "tiny", "prompt": "hello"}
    async with router.http.post("/v1/completions", headers=headers, json=body) as response:
        assert response.status == 403
        assert (await response.json())["error"]["type"] == "permission_error"
    _, submit = await router.submitted(ALICE, ("x-quire-tenant", "alice"))
    assert submit.tenant == "alice"


async def test_tenants_kv_is_for_operators_to_see(router):
    request = inference_pb2.DescribeKvRequest()
    error = await failure(router.stub.DescribeKv(request, metadata=bearer(ALICE)))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert await router.stub.DescribeKv(request, metadata=bearer(OPERATOR))
    request = inference_pb2.DescribeActivityRequest()
    error = await failure(router.stub.DescribeActivity(request, metadata=bearer(ALICE)))
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert await router.stub.DescribeActivity(request, metadata=bearer(OPERATOR))


async def test_the_page_is_anybodys_and_what_it_shows_is_not(router):
    async with router.http.get("/ui") as page, router.http.get("/ui/main.js") as script:
        assert (page.status, script.status) == (200, 200)
    for path in ("/ui/api/load", "/ui/api/kv", "/ui/api/activity", "/ui/../v1/models", "/ui/api"):
        async with router.http.get(URL(path, encoded=True)) as response:
            assert response.status == 401, path
    async with router.http.post("/ui") as response:
        assert response.status == 401
    alice, operator = ({"Authorization": f"Bearer {key}"} for key in (ALICE, OPERATOR))
    for path, status in (("load", 200), ("kv", 403), ("activity", 403)):
        async with router.http.get(f"/ui/api/{path}", headers=alice) as response:
            assert response.status == status
        async with router.http.get(f"/ui/api/{path}", headers=operator) as response:
            assert response.status == 200


async def test_another_tenants_request_id_is_as_good_as_free(router):
    _, alices = await router.submitted(ALICE, request_id="mine", sampling={"max_tokens": 4})
    error = await failure(router.generate(ALICE_2, request_id="mine"))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    call, bobs = await router.submitted(BOB, request_id="mine", sampling={"max_tokens": 4})
    call.cancel()
    assert await router.scheduler.cancels.get() == [bobs.first_seq_key]
    assert alices.first_seq_key != bobs.first_seq_key


async def test_no_tenant_can_have_another_tenants_cache_salt(router):
    salts = {}
    for key in (OPERATOR, ALICE, ALICE_2, BOB):
        for salt in ("", "s", "alice", "alice\0s"):
            call, submit = await router.submitted(key, cache_salt=salt, sampling={"max_tokens": 4})
            salts[key, salt] = submit.cache_salt
            await router.finish(submit)
            async for _ in call:
                pass
    # Even who knows what a salt is made into, and sends that, has one of its own.
    _, submit = await router.submitted(BOB, cache_salt=salts[ALICE, ""], sampling={"max_tokens": 4})
    assert submit.cache_salt not in salts.values()
    assert all(len(salt) == 64 for salt in salts.values())
    for salt in ("", "s"):
        assert salts[ALICE, salt] == salts[ALICE_2, salt], "a tenant's keys share"
    assert len(set(salts.values())) == 12


async def test_quota_is_named_with_when_to_come_again(router):
    _, submit = await router.submitted(BOB, sampling={"max_tokens": 4})
    error = await failure(router.generate(BOB, sampling={"max_tokens": 4}))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_concurrent_requests is 1" in error.details()
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    details = status_pb2.Status.FromString(packed).details
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
    headers = {"Authorization": f"Bearer {BOB}"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    async with router.http.post("/v1/completions", headers=headers, json=body) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
    await router.submitted(ALICE)  # others are served
    await router.finish(submit)


async def test_quota_is_free_again_however_a_request_ends(router):
    small = {"max_tokens": 4}
    error = await failure(router.generate(BOB, sampling={"max_tokens": 41}))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens_in_flight" in error.details()
    call, submit = await router.submitted(BOB, sampling=small)
    call.cancel()
    await router.scheduler.cancels.get()
    call, submit = await router.submitted(BOB, sampling=small)
    await router.scheduler.refuse(submit.first_seq_key, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    await failure(call)
    call, submit = await router.submitted(BOB, sampling=small)
    await router.finish(submit)
    async for _ in call:
        pass
    await router.submitted(BOB, sampling=small)


async def test_what_runs_on_without_its_client_is_still_in_flight(router):
    call, _ = await router.submitted(BOB, sampling={"max_tokens": 30}, resumable=True)
    call.cancel()
    await router.scheduler.leaves.get()
    error = await failure(router.generate(BOB, sampling={"max_tokens": 30}))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "tokens in flight" in error.details()


@pytest.fixture
def logged(capfd):
    """Reads all that a router logs; other tests' logs are theirs again afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    logs.configure("debug", "json", "router")
    yield capfd.readouterr
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


async def test_no_key_is_in_logs_errors_or_answers(settings, tmp_path, logged):
    said = [repr(settings)]
    async with running(settings, tmp_path) as router:
        for key in (ALICE, f"{ALICE}-wrong"):
            error = await failure(router.generate(key, ("x-quire-tenant", "bob")))
            said.append(repr(error))
            headers = {"Authorization": f"Bearer {key}"}
            async with router.http.post("/v1/completions", headers=headers, data="{") as response:
                said.append(await response.text())
        _, submit = await router.submitted(ALICE)
        said.append(str(submit))
        async with router.http.get("/metrics") as response:
            said.append(await response.text())
    out, err = logged()
    assert "listening" in err
    for key in (OPERATOR, ALICE, BOB):
        assert key not in "".join((*said, out, err))


def test_help_and_complaints_do_not_echo_keys(model_dir, monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_API_KEY", OPERATOR)
    for flags in (["--help"], [f"--model={model_dir}", "--drain-s=x"]):
        with pytest.raises(SystemExit):
            parse_settings(RouterSettings, "quire-router", flags)
    assert OPERATOR not in "".join(capsys.readouterr())
    settings = parse_settings(RouterSettings, "r", [f"--model={model_dir}", "--api-key=a,b"])
    assert [key.get_secret_value() for key in settings.api_key] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "keys: Field required"),
        ("keys = []", "keys: List should have at least 1 item"),
        ("[[keys]]\nkey = 'secret'", "keys.0.tenant: Field required"),
        ("[[keys]]\ntenant = 'a'", "keys.0: it must have either key or sha256"),
        ("[[keys]]\ntenant = 'a'\nkey = 'secret'\nsha256 = '00'", "keys.0.sha256: "),
        ("[[keys]]\ntenant = 'a'\nkey = 'se cret'", "keys.0.key: "),
        ("[[keys]]\ntenant = 'a'\nkey = 'secret'\ntennant = 'b'", "keys.0.tennant: Extra"),
        ("[[keys]]\ntenant = 'a'\nkey = 'secret'\n" * 2, "keys.1 is the same as keys.0"),
        ("[[keys]]\ntenant = 'a'\nkey = 'secret'\n[tenants.b]", "tenants.b has no key"),
        (
            "[[keys]]\ntenant = 'a'\nkey = 'secret'\n[tenants.a]\nrequests_per_minute = 0",
            "tenants.a.requests_per_minute: ",
        ),
        ("[[keys]\n", "it is no TOML"),
    ],
)
def test_file_of_keys_that_cannot_be_used_says_where(tmp_path, text, problem):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ApiKeysError) as caught:
        read_keys_file(file)
    assert problem in str(caught.value)
    assert str(file) in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_another_tenants_request_is_neither_resumed_nor_cancelled(router):
    _, alices = await router.submitted(ALICE, request_id="mine", resumable=True)
    resume = inference_pb2.ResumeRequest(request_id="mine")
    cancel = inference_pb2.CancelRequest(request_id="mine")
    forged = (*bearer(OPERATOR), ("x-quire-tenant", "alice"))
    for metadata in (forged, (*bearer(BOB), ("x-quire-tenant", "alice"))):
        for call in (
            router.stub.Resume(resume, metadata=metadata),
            router.stub.Cancel(cancel, metadata=metadata),
        ):
            assert (await failure(call)).code() is grpc.StatusCode.PERMISSION_DENIED
    call = router.stub.Resume(resume, metadata=bearer(BOB))
    asked = await router.scheduler.resumes.get()
    assert (asked.request_id, asked.tenant) == ("mine", "bob")
    call.cancel()
    assert router.scheduler.cancels.empty()
    await router.scheduler.step({alices.first_seq_key: [70]})

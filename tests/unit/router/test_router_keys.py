"""API keys: which calls are allowed at which API, and keys are never shown."""

import asyncio
import hashlib
import itertools
import logging

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from keyed_router import ALICE, ALICE_2, BOB, OPERATOR, bearer, failure, keyed_settings, running
from yarl import URL

from quire.client import AsyncClient
from quire.client.types import SamplingParams
from quire.v1 import adapters_pb2, adapters_pb2_grpc, inference_pb2
from router.access.api_keys import ApiKeysError, read_keys_file
from router.settings import RouterSettings
from rpc.observe import logs
from rpc.settings import parse_settings

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def settings(model_dir, tmp_path):
    return keyed_settings(model_dir, tmp_path)


@pytest.fixture
async def router(settings, tmp_path):
    async with running(settings, tmp_path) as router:
        yield router


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
    for method in methods:  # including methods for which this test has no request
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


async def test_anthropics_clients_may_send_a_key_in_their_own_header(router):
    for headers, status in (
        ({"x-api-key": ALICE}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ALICE, "Authorization": "Bearer wrong"}, 401),
    ):
        async with router.http.get("/v1/models", headers=headers) as response:
            assert response.status == status
    async with router.http.post("/v1/messages", headers={"x-api-key": "wrong"}) as response:
        assert response.status == 401
        error = (await response.json())["error"]
        assert (error["type"], error["message"]) == (
            "authentication_error",
            "the API key is unknown",
        )


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


async def test_the_page_is_public_but_its_data_needs_a_key(router):
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


async def test_only_an_operator_loads_adapters_by_whichever_face(router):
    request = adapters_pb2.LoadAdapterRequest(name="a", directory="/adapters/a")
    stub = adapters_pb2_grpc.AdapterServiceStub(router.channel)
    body = {"lora_name": "b", "lora_path": "/adapters/b"}
    for key, code, status in ((None, "UNAUTHENTICATED", 401), (ALICE, "PERMISSION_DENIED", 403)):
        assert (await failure(stub.LoadAdapter(request, metadata=bearer(key)))).code().name == code
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with router.http.post("/v1/load_lora_adapter", json=body, headers=headers) as answer:
            assert answer.status == status
    assert router.scheduler.adapters == ()
    await stub.LoadAdapter(request, metadata=bearer(OPERATOR))
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    async with router.http.post("/v1/load_lora_adapter", json=body, headers=headers) as answer:
        assert answer.status == 200
    assert router.scheduler.adapters == ("a", "b")


@pytest.fixture
def logged(capfd):
    """Reads a router's logs, and restores the log settings afterwards."""
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
        ("[[keys]\n", "it is not TOML"),
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


async def test_a_broken_http_stream_is_resumed_by_its_tenant_only(router):
    body = {"model": "tiny", "prompt": "a", "stream": True}
    alice = {"authorization": f"Bearer {ALICE}"}
    resumable = alice | {"X-Quire-Resumable": "true"}
    calling = asyncio.create_task(router.http.post("/v1/completions", json=body, headers=resumable))
    submit = await router.scheduler.submits.get()
    await router.scheduler.step({submit.first_seq_key: [70]})
    async with await calling as response:
        line = (await response.content.readline()).decode()
    event_id = line.removeprefix("id: ").strip()
    assert line.startswith("id: ")
    await router.scheduler.leaves.get()

    resume = {"Last-Event-ID": event_id}
    for claimed in ({}, {"x-quire-tenant": "bob"}, {"x-quire-tenant": "alice"}):
        headers = {"authorization": f"Bearer {BOB}"} | resume | claimed
        calling = asyncio.create_task(
            router.http.post("/v1/completions", json=body, headers=headers)
        )
        if claimed.get("x-quire-tenant") == "alice":
            assert (await calling).status == 403
            continue
        asked = await router.scheduler.resumes.get()
        assert asked.tenant == "bob", "whose request the scheduler does not find"
        calling.cancel()
    calling = asyncio.create_task(
        router.http.post("/v1/completions", json=body, headers=alice | resume)
    )
    asked = await router.scheduler.resumes.get()
    assert (asked.tenant, asked.request_id) == ("alice", submit.request_id)
    calling.cancel()

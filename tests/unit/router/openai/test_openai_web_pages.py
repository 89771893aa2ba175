"""A router without API keys accepts calls from some web pages only, with JSON bodies declared."""

import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from openai_fakes import FakeCells, FakeInference

from contract.errors import PermissionDeniedError
from router.http.api import OPERATOR_PATHS, routes
from router.http.cross_origin import PageGuard, is_loopback

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "sql", "lora_path": "/adapters/sql"}
COMPUTING = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("path", [LOAD, UNLOAD, *COMPUTING])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_body_that_is_not_said_to_be_json_is_refused(
    server, adapters, inference, path, kind
):
    headers = {} if kind is None else {"Content-Type": kind}
    skip = ["Content-Type"] if kind is None else []
    body = json.dumps(BODY if path in (LOAD, UNLOAD) else COMPUTING[path]).encode()
    url = f"http://{server[0]}:{server[1]}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers, skip_auto_headers=skip) as response,
    ):
        answer = await response.json()
    assert response.status == 415
    assert "it must be application/json" in answer["error"]["message"]
    assert not adapters.calls
    assert not inference.requests


@pytest.mark.parametrize("path", [LOAD, UNLOAD, *COMPUTING, "/v1/models"])
@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"Origin": "http://evil.test"}, "Origin is"),
        ({"Origin": "http://localhost"}, "Origin is"),  # with another port
        ({"Origin": "null"}, "Origin is"),
        ({"Origin": "http://["}, "Origin is"),
        ({"Host": "evil.test"}, "Host is"),
        ({"Host": "evil.test:80", "Origin": "http://evil.test:80"}, "Host is"),
        ({"Host": "127.0.0.1.evil.test"}, "Host is"),
        ({"Host": "[::1"}, "Host is"),
        ({"Host": ""}, "Host is"),
    ],
)
async def test_pages_of_others_are_refused(http, adapters, inference, path, headers, problem):
    method = "GET" if path == "/v1/models" else "POST"
    body = BODY if path in (LOAD, UNLOAD) else COMPUTING.get(path)
    async with http.request(method, path, json=body, headers=headers) as response:
        answer = await response.json()
    assert response.status == 403
    assert answer["error"]["message"].startswith(problem)
    assert not adapters.calls
    assert not inference.requests


async def test_a_page_that_is_allowed_may_call(http, inference):
    headers = {"Origin": "https://app.test"}
    async with http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
        assert response.status == 200
    assert inference.requests


async def test_where_a_router_listens_to_others_only_operators_routes_are_guarded(adapters):
    guard = PageGuard(frozenset({"0.0.0.0"})).middleware(OPERATOR_PATHS)
    app = web.Application(middlewares=[guard])
    app.add_routes(routes(FakeCells(FakeInference()), adapters, max_body_bytes=2**20))
    async with TestClient(TestServer(app)) as http:
        headers = {"Host": "quire.example"}
        async with http.post("/v1/completions", json={"prompt": "x"}, headers=headers) as response:
            assert response.status == 200
        for path in (LOAD, UNLOAD):
            async with http.post(path, json=BODY, headers=headers) as response:
                assert response.status == 403
    assert not adapters.calls


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "Quire.test:1"]
)
async def test_calls_by_own_names_and_own_pages_are_taken(http, host):
    for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
        async with http.post(LOAD, json=BODY, headers=headers) as response:
            assert response.status == 200


def test_where_a_certificate_proves_the_name_any_will_do():
    guard = PageGuard(None)
    guard.check({"Host": "quire.internal"})
    guard.check({"Host": "quire.internal", "Origin": "https://quire.internal"})
    with pytest.raises(PermissionDeniedError, match="Origin is"):
        guard.check({"Host": "quire.internal", "Origin": "https://evil.test"})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("LocalHost", True),
        ("127.9.9.9", True),
        ("0.0.0.0", False),
        ("::", False),
        ("quire.internal", False),
    ],
)
def test_what_is_loopback(host, expected):
    assert is_loopback(host) is expected

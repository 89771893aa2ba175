"""Adapters over HTTP: bodies and answers are vLLM's, errors OpenAI's."""

import json

import pytest

from contract.errors import InvalidArgumentError, PermissionDeniedError
from router.http.web_pages import PageGuard

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "sql", "lora_path": "/adapters/sql"}


async def post(http, path, body):
    async with http.post(path, json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


async def test_an_adapter_is_loaded_and_unloaded(http, adapters):
    added = "Success: LoRA adapter 'sql' added successfully."
    assert await post(http, LOAD, BODY) == (200, added)
    there = "Success: LoRA adapter 'sql' was there already."
    assert await post(http, LOAD, BODY | {"load_inplace": False}) == (200, there)
    removed = "Success: LoRA adapter 'sql' removed successfully."
    assert await post(http, UNLOAD, {"lora_name": "sql"}) == (200, removed)
    assert adapters.calls[0] == ("sql", "/adapters/sql", "ipv4:127.0.0.1")
    status, body = await post(http, UNLOAD, {"lora_name": "sql"})
    assert (status, body["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (LOAD, {"lora_name": "sql"}, "lora_path is missing"),
        (LOAD, {"lora_path": "/a"}, "lora_name is missing"),
        (LOAD, BODY | {"load_inplace": True}, "load_inplace is true; it is not supported"),
        (UNLOAD, {"lora_name": "sql", "lora_int_id": 1}, "lora_int_id is 1; it is not supported"),
        (UNLOAD, {"lora_name": 7}, "lora_name"),
    ],
)
async def test_bodies_are_checked(http, adapters, path, body, problem):
    status, answer = await post(http, path, body)
    assert status == 400
    assert problem in answer["error"]["message"]
    assert not adapters.calls


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_body_that_is_not_said_to_be_json_is_refused(http, adapters, path, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    skip = ["Content-Type"] if kind is None else []
    async with http.post(
        path, data=json.dumps(BODY).encode(), headers=headers, skip_auto_headers=skip
    ) as response:
        answer = await response.json()
    assert response.status == 415
    assert "it must be application/json" in answer["error"]["message"]
    assert not adapters.calls


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"Origin": "http://evil.test"}, "Origin is"),
        ({"Origin": "http://localhost"}, "Origin is"),  # of another port
        ({"Origin": "null"}, "Origin is"),
        ({"Origin": "http://["}, "Origin is"),
        ({"Host": "evil.test"}, "Host is"),
        ({"Host": "evil.test:80", "Origin": "http://evil.test:80"}, "Host is"),
        ({"Host": "127.0.0.1.evil.test"}, "Host is"),
        ({"Host": "[::1"}, "Host is"),
        ({"Host": ""}, "Host is"),
    ],
)
async def test_pages_of_others_are_refused(http, adapters, path, headers, problem):
    async with http.post(path, json=BODY, headers=headers) as response:
        answer = await response.json()
    assert response.status == 403
    assert answer["error"]["message"].startswith(problem)
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


async def test_what_is_refused_is_named_as_in_the_body(http, adapters):
    adapters.refusal = InvalidArgumentError("directory", "is '/adapters/sql': it is empty")
    status, answer = await post(http, LOAD, BODY)
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert answer["error"]["message"] == "lora_path is '/adapters/sql': it is empty"


async def test_who_is_no_operator_is_refused(http, adapters):
    adapters.refusal = PermissionDeniedError("a tenant's key")
    status, answer = await post(http, LOAD, BODY)
    assert (status, answer["error"]["type"]) == (403, "permission_error")

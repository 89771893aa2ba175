"""Adapters over HTTP: bodies and answers are vLLM's, errors OpenAI's."""

import pytest

from contract.errors import InvalidArgumentError, PermissionDeniedError

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


async def test_a_refusal_names_the_field_of_the_body(http, adapters):
    adapters.refusal = InvalidArgumentError("directory", "is '/adapters/sql': it is empty")
    status, answer = await post(http, LOAD, BODY)
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert answer["error"]["message"] == "lora_path is '/adapters/sql': it is empty"


async def test_callers_that_are_no_operators_are_refused(http, adapters):
    adapters.refusal = PermissionDeniedError("a tenant's key")
    status, answer = await post(http, LOAD, BODY)
    assert (status, answer["error"]["type"]) == (403, "permission_error")

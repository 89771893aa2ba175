"""vLLM's additional routes: /tokenize, /detokenize, /version, /load."""

from importlib.metadata import version

import pytest

HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "<user>Hello<assistant>"
TOOL = {"type": "function", "function": {"name": "add"}}


async def post(http, path, body, status=200):
    async with http.post(path, json=body) as response:
        assert response.status == status, await response.text()
        assert response.headers["X-Request-Id"]
        return await response.json()


async def test_a_text_becomes_tokens(http):
    assert await post(http, "/tokenize", {"model": "org/tiny", "prompt": "Hi"}) == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [0, 72, 105],
        "token_strs": None,
    }
    body = {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True}
    answer = await post(http, "/tokenize", body)
    assert (answer["tokens"], answer["token_strs"]) == ([72, 105], ["H", "i"])


async def test_a_chat_becomes_the_tokens_that_it_would_be_answered_from(http, inference):
    answer = await post(http, "/tokenize", {"messages": HELLO})
    assert "".join(map(chr, answer["tokens"])) == PROMPT
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "tools": [TOOL]}
    await post(http, "/tokenize", {"messages": HELLO, **options})
    plain, kwargs = [kwargs for _, kwargs in inference.text.chats]
    assert plain == {"add_generation_prompt": True}
    assert kwargs == {"add_generation_prompt": False, "a": 1, "tools": [TOOL]}


async def test_tokens_become_text_with_special_tokens(http):
    answer = await post(http, "/detokenize", {"model": "org/tiny", "tokens": [0, 72, 105]})
    assert answer == {"prompt": "\0Hi"}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/tokenize", {}, "prompt", "or messages must be set"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt", "and not both"),
        ("/tokenize", {"prompt": "x" * 65}, "prompt", "prompt has 65 bytes"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools", "with prompt it must be unset"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", ""),
        ("/tokenize", {"messages": []}, "messages", "messages is []"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens", ""),
        (
            "/tokenize",
            {"messages": HELLO, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs",
            "key tools",
        ),
        (
            "/tokenize",
            {"messages": HELLO, "chat_template": "x"},
            "chat_template",
            "does not accept templates from requests",
        ),
        (
            "/tokenize",
            {"messages": HELLO, "continue_final_message": True},
            "continue_final_message",
            "must be the assistant's",
        ),
        ("/detokenize", {}, "tokens", "tokens is missing"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]", 'is "x"'),
        ("/detokenize", {"tokens": [1, 0x110000]}, "tokens[1]", "tokens[1] is 1114112"),
    ],
)
async def test_invalid_values_are_refused_by_name(http, path, body, param, message):
    error = (await post(http, path, body, status=400))["error"]
    assert error["param"] == param
    assert message in error["message"]


async def test_an_unknown_model_is_not_found(http):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        error = (await post(http, path, {"model": "nonesuch", **body}, status=404))["error"]
        assert "nonesuch" in error["message"]


async def test_version_and_load_are_served(http):
    async with http.get("/version") as response:
        assert await response.json() == {"version": version("quire")}
    async with http.get("/load") as response:
        load = await response.json()
    assert load["num_requests_waiting"] == 1
    running, waiting, swapped = (
        load[f"num_requests_{state}"] for state in ("running", "waiting", "swapped")
    )
    assert load["server_load"] == running + waiting + swapped


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
async def test_a_wrong_method_is_an_error_in_openais_shape(http, path):
    async with http.get(path) as response:
        assert response.status == 405
        assert f"{path} does not support GET" in (await response.json())["error"]["message"]

"""A scripted agent whose model calls a tool in each turn; it runs while processes are killed.

The model is a script that a simulated worker outputs. The chat template ends each result of the
tool with an end token, so that turn N of the conversation gets output N (`Script` in
sim_worker/draw.py).
"""

import asyncio
import contextlib
import hashlib
import json
import random
import shutil
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import tokenizers
from harness.case import SHIPPED_MODEL

_ASK_AGAIN_S = 0.3
_READ_S = 5.0
"""A stream that is silent for this long has broken, because it has a heartbeat each second."""
_TURN_S = 300.0
_MODEL_LEN = 32_768
_OK = 200
_RETRIED = (409, 429, 500, 503, 504, 529)
_TASK = "Note what you see, step by step."
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}\n"
    "{% if m.role == 'tool' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def write_model(directory: Path, num_turns: int) -> tuple[Path, Path]:
    """Write a model without weights, and the script of its outputs; return their paths."""
    model = directory / "scripted"
    model.mkdir()
    shutil.copy(SHIPPED_MODEL / "tokenizer.json", model)
    for name, changes in (
        ("config.json", {"max_position_embeddings": _MODEL_LEN}),
        ("tokenizer_config.json", {"chat_template": _TEMPLATE, "model_max_length": _MODEL_LEN}),
    ):
        fields = json.loads((SHIPPED_MODEL / name).read_text())
        (model / name).write_text(json.dumps(fields | changes))
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    outputs = [
        tokenizer.encode(_output(turn, num_turns), add_special_tokens=False).ids
        for turn in range(num_turns)
    ]
    script = directory / "script.json"
    script.write_text(json.dumps(outputs))
    return model, script


def _output(turn: int, num_turns: int) -> str:
    if turn == num_turns - 1:
        return f"That were {turn} steps; the notes are complete."
    text = f'Step {turn}: “é\\n{{"a": [{turn}]}}” ' + " ".join(f"word{i}" for i in range(turn % 20))
    call = json.dumps({"name": "note", "arguments": {"text": text}}, ensure_ascii=False)
    return f"Schritt {turn}, schön: I note it.\n<tool_call>\n{call}\n</tool_call>"


class Notes:
    """The agent's tool. A call that is made twice, or is left out, changes all later results."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._num = 0

    def note(self, arguments: dict[str, str]) -> str:
        self._num += 1
        self._hash.update(arguments["text"].encode())
        return f"{self._num} notes, {self._hash.hexdigest()}"


class Agent:
    """Works on the task through one of the APIs, by way of routers that may die at any time."""

    def __init__(self, urls: Sequence[str], api: str, chance: random.Random) -> None:
        """`api` is "responses" or "messages"."""
        self._urls = urls
        self._api = api
        self._chance = chance
        self.num_turns = 0
        self.num_breaks = 0
        """Streams and calls that broke."""

    async def run(self) -> bytes:
        """Run to the end; return the transcript of texts, calls, notes and counts."""
        notes, transcript = Notes(), []
        turn = self._respond if self._api == "responses" else self._message
        async with aiohttp.ClientSession() as session:
            state: dict[str, Any] = {}
            while True:
                async with asyncio.timeout(_TURN_S):
                    said, calls = await turn(session, state)
                self.num_turns += 1
                transcript.append(said)
                results = {call_id: notes.note(arguments) for call_id, arguments in calls}
                transcript += results.values()
                if not results:
                    return json.dumps(transcript, ensure_ascii=False, indent=1).encode()
                state["results"] = results

    async def _respond(
        self, session: aiohttp.ClientSession, state: dict[str, Any]
    ) -> tuple[object, list[tuple[str, dict[str, str]]]]:
        """Make a turn of a conversation that the service stores."""
        results = state.get("results", {})
        body = {
            "stream": True,
            "input": _TASK
            if not results
            else [
                {"type": "function_call_output", "call_id": call_id, "output": result}
                for call_id, result in results.items()
            ],
            "previous_response_id": state.get("id"),
            "tools": [{"type": "function", "name": "note", "parameters": _PARAMETERS}],
        }
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        last, response_id = -1, None
        while True:
            method, path = "POST", "/v1/responses"
            if response_id is not None:
                method, path = "GET", f"{path}/{response_id}?stream=true&starting_after={last}"
            asked = {"json": body, "headers": headers} if method == "POST" else {}
            async with aclosing(self._events(session, method, path, asked)) as events:
                async for event in events:
                    if (number := event["sequence_number"]) != last + 1:
                        raise LookupError(f"{response_id}: event {number} after {last}")
                    last = number
                    if event["type"] == "response.created":
                        response_id = event["response"]["id"]
                    if event["type"] == "response.failed":
                        raise LookupError(f"{response_id}: {event['response']['error']}")
                    if event["type"] in ("response.completed", "response.incomplete"):
                        state["id"] = response_id
                        return _of_response(event["response"])

    async def _message(
        self, session: aiohttp.ClientSession, state: dict[str, Any]
    ) -> tuple[object, list[tuple[str, dict[str, str]]]]:
        """Make a turn of a conversation that the agent stores; repeat a call that breaks."""
        messages = state.setdefault("messages", [{"role": "user", "content": _TASK}])
        if results := state.get("results"):
            content = [
                {"type": "tool_result", "tool_use_id": call_id, "content": result}
                for call_id, result in results.items()
            ]
            messages.append({"role": "user", "content": content})
        body = {
            "model": "scripted",
            "max_tokens": 4096,
            "stream": True,
            "messages": messages,
            "tools": [{"name": "note", "input_schema": _PARAMETERS}],
        }
        while True:
            blocks: list[dict[str, Any]] = []
            end: dict[str, Any] = {}
            asked = {"json": body}
            async with aclosing(self._events(session, "POST", "/v1/messages", asked)) as events:
                async for event in events:
                    match event:
                        case {"content_block": dict(block)}:
                            blocks.append({**block, **({"input": ""} if "input" in block else {})})
                        case {"delta": {"text": str(text)}}:
                            blocks[-1]["text"] += text
                        case {"delta": {"partial_json": str(part)}}:
                            blocks[-1]["input"] += part
                        case {"type": "message_delta"}:
                            end = event
                        case {"type": "message_stop"}:
                            for block in blocks:
                                if "input" in block:
                                    block["input"] = json.loads(block["input"])
                            messages.append({"role": "assistant", "content": blocks})
                            return _of_message(blocks, end)

    async def _events(
        self, session: aiohttp.ClientSession, method: str, path: str, asked: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send a request to any router, and yield its events until the stream ends or breaks."""
        url = f"{self._chance.choice(self._urls)}{path}"
        timeout = aiohttp.ClientTimeout(sock_read=_READ_S)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with session.request(method, url, timeout=timeout, **asked) as response:
                if response.status not in (_OK, *_RETRIED):
                    raise LookupError(f"{response.status} {await response.text()}")
                async for line in response.content:
                    if response.status == _OK and line.startswith(b"data: {"):
                        yield json.loads(line[6:])
        self.num_breaks += 1
        await asyncio.sleep(_ASK_AGAIN_S)


def _of_response(response: dict[str, Any]) -> tuple[object, list[tuple[str, dict[str, str]]]]:
    said: list[object] = [response["status"], response["usage"]["total_tokens"]]
    calls = []
    for item in response["output"]:
        if item["type"] == "function_call":
            said.append([item["name"], item["arguments"]])
            calls.append((item["call_id"], json.loads(item["arguments"])))
        else:
            said.append("".join(part["text"] for part in item["content"]))
    return said, calls


def _of_message(
    blocks: Sequence[dict[str, Any]], end: dict[str, Any]
) -> tuple[object, list[tuple[str, dict[str, str]]]]:
    said: list[object] = [end["delta"]["stop_reason"], end["usage"]["output_tokens"]]
    said += [block.get("text") or [block["name"], block["input"]] for block in blocks]
    return said, [(block["id"], block["input"]) for block in blocks if "input" in block]

"""Turns of /v1/responses and /v1/batches while processes are killed, compared at their ends."""

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import aiohttp

_ASK_AGAIN_S = 0.3
_TIMEOUT_S = 300.0
_READ_S = 5.0
_BATCH_SHARE = 0.05
_BATCH_LINES = 5
_ENDPOINT = "/v1/responses"
_QUESTIONS = (
    "add two numbers",
    "read a file line by line",
    "sort a list of names",
    "a class of a stack",
    "parse a date",
    "count words in a text",
)


@dataclass(slots=True)
class TurnVerdict:
    """What went wrong with turns: each list has a line for each wrong turn."""

    num: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    contradicted: list[str] = field(default_factory=list)


class TurnClient:
    """A client of several routers, which does not know when processes are killed."""

    def __init__(self, urls: Sequence[str], chance: random.Random) -> None:
        self._urls = urls
        self._chance = chance
        self._references: list[tuple[dict[str, Any], str]] = []
        self.verdict = TurnVerdict()

    async def prepare(self, num: int, max_tokens: int) -> None:
        """Ask each question once without faults; the answers are not stored."""
        async with aiohttp.ClientSession() as session:
            for i in range(num):
                body = {
                    "input": f"{_QUESTIONS[i % len(_QUESTIONS)]} {i}",
                    "temperature": 0.0 if i % 2 else 0.8,
                    "seed": i,
                    "max_output_tokens": max_tokens,
                    "ignore_eos": True,
                }
                answer = await self._call(session, "POST", "/responses", {**body, "store": False})
                self._references.append((body, _text(answer)))

    async def keep_asking(self, num: int, at_once: int) -> None:
        """Run `num` turns to their ends, several at a time."""
        left = iter(range(num))

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                for _ in left:
                    if self._chance.random() < _BATCH_SHARE:
                        await self._batch(session, [None, *islice(left, _BATCH_LINES - 1)])
                    else:
                        await self._turn(session)

        await asyncio.gather(*(ask() for _ in range(at_once)))

    async def _turn(self, session: aiohttp.ClientSession) -> None:
        body, expected = self._chance.choice(self._references)
        is_stream, key = self._chance.random() < 0.5, uuid.uuid4().hex
        verdict = self.verdict
        verdict.num += 1
        headers = {"Idempotency-Key": key}
        body = {**body, "background": True}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                accepted = await self._call(session, "POST", "/responses", body, headers)
                turn_id = accepted["id"]
                streamed = await self._follow(session, turn_id) if is_stream else None
                whole = await self._ended(session, turn_id)
                again = await self._call(session, "POST", "/responses", body, headers)
        except (TimeoutError, LookupError) as error:
            verdict.lost.append(f"{key}: {type(error).__name__} {error}")
            return
        if again["id"] != turn_id:
            verdict.doubled.append(f"{key}: {turn_id} and {again['id']}")
        for what, text in (("kept", _text(whole)), ("streamed", streamed)):
            if text is not None and text != expected:
                verdict.contradicted.append(f"{turn_id}: {what} {text!r} for {expected!r}")

    async def _batch(self, session: aiohttp.ClientSession, lines: Sequence[object]) -> None:
        """Run some turns as the lines of a batch."""
        asked = [self._chance.choice(self._references) for _ in lines]
        verdict, key = self.verdict, uuid.uuid4().hex
        verdict.num += len(asked)
        content = "\n".join(
            json.dumps({"custom_id": str(i), "method": "POST", "url": _ENDPOINT, "body": body})
            for i, (body, _) in enumerate(asked)
        )
        headers = {"Idempotency-Key": key}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                file = await self._call(session, "POST", "/files", content, headers)
                body = {
                    "input_file_id": file["id"],
                    "endpoint": _ENDPOINT,
                    "completion_window": "24h",
                }
                accepted = await self._call(session, "POST", "/batches", body, headers)
                ended = await self._ended_batch(session, accepted["id"])
                again = await self._call(session, "POST", "/batches", body, headers)
                told = await self._call(
                    session, "GET", f"/files/{ended['output_file_id']}/content", as_lines=True
                )
        except (TimeoutError, LookupError) as error:
            verdict.lost += [f"{key}: {type(error).__name__} {error}"] * len(asked)
            return
        if again["id"] != accepted["id"]:
            verdict.doubled.append(f"{key}: {accepted['id']} and {again['id']}")
        answers = {line["custom_id"]: line["response"]["body"] for line in told["lines"]}
        if len(answers) < len(told["lines"]):
            verdict.doubled.append(f"{accepted['id']}: a line is answered twice")
        for i, (_, expected) in enumerate(asked):
            if (answer := answers.get(str(i))) is None:
                verdict.lost.append(f"{accepted['id']}: line {i}")
            elif (text := _text(answer)) != expected:
                verdict.contradicted.append(f"{accepted['id']}: {text!r} for {expected!r}")

    async def _ended_batch(self, session: aiohttp.ClientSession, batch_id: str) -> dict[str, Any]:
        while True:
            batch = await self._call(session, "GET", f"/batches/{batch_id}")
            if batch["status"] == "completed":
                return batch
            if batch["status"] not in ("validating", "in_progress"):
                raise LookupError(f"{batch_id} is {batch['status']}: {batch['errors']}")
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _follow(self, session: aiohttp.ClientSession, turn_id: str) -> str:
        """Read a turn's stream; after each break, continue after the last event."""
        last, text = -1, ""
        while True:
            path = f"/responses/{turn_id}?stream=true&starting_after={last}"
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(
                    self._url(path), timeout=aiohttp.ClientTimeout(sock_read=_READ_S)
                ) as response:
                    if response.status == 404:
                        raise LookupError(turn_id)
                    async for line in response.content:
                        if not line.startswith(b"data: {"):
                            continue
                        event = json.loads(line[6:])
                        if (number := event["sequence_number"]) != last + 1:
                            self.verdict.doubled.append(f"{turn_id}: event {number} after {last}")
                        last = number
                        if event["type"] == "response.output_text.delta":
                            text += event["delta"]
                        if event["type"] in ("response.completed", "response.incomplete"):
                            return text
                        if event["type"] == "response.failed":
                            raise LookupError(f"{turn_id}: {event['response']['error']}")
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _ended(self, session: aiohttp.ClientSession, turn_id: str) -> dict[str, Any]:
        while True:
            response = await self._call(session, "GET", f"/responses/{turn_id}")
            if response["status"] in ("completed", "incomplete"):
                return response
            if response["status"] not in ("queued", "in_progress"):
                raise LookupError(f"{turn_id} is {response['status']}: {response['error']}")
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: dict[str, Any] | str | None = None,
        headers: dict[str, str] | None = None,
        *,
        as_lines: bool = False,
    ) -> dict[str, Any]:
        """Call routers until one answers. A `body` that is a text is uploaded as a file."""
        timeout = aiohttp.ClientTimeout(total=60)
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                form = None
                if isinstance(body, str):
                    form = aiohttp.FormData({"purpose": "batch"})
                    form.add_field("file", body, filename="in.jsonl")
                async with session.request(
                    method,
                    self._url(path),
                    json=None if isinstance(body, str) else body,
                    data=form,
                    headers=headers,
                    timeout=timeout,
                ) as response:
                    if response.status == 200 and as_lines:
                        text = await response.text()
                        return {"lines": [*map(json.loads, text.splitlines())]}
                    if response.status == 200:
                        answer: dict[str, Any] = await response.json()
                        return answer
                    if response.status not in (409, 429, 500, 503, 504):
                        raise LookupError(f"{response.status} {await response.text()}")
            await asyncio.sleep(_ASK_AGAIN_S)

    def _url(self, path: str) -> str:
        return f"{self._chance.choice(self._urls)}/v1{path}"


def _text(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message"
        for part in item["content"]
    )  # fmt: skip

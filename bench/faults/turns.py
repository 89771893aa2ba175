"""Turns of /v1/responses while processes are killed, each followed to its end and compared."""

import asyncio
import contextlib
import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_ASK_AGAIN_S = 0.3
_TIMEOUT_S = 300.0
_READ_S = 5.0
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
    """The faults of turns: each list has a line for each fault."""

    num: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    contradicted: list[str] = field(default_factory=list)


class TurnClient:
    """A client of several routers that does not know about faults."""

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
                answer = await self._call(session, "POST", "", {**body, "store": False})
                self._references.append((body, _text(answer)))

    async def keep_asking(self, num: int, at_once: int) -> None:
        """Run `num` turns to their ends, several at a time."""
        left = iter(range(num))

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                for _ in left:
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
                accepted = await self._call(session, "POST", "", body, headers)
                turn_id = accepted["id"]
                streamed = await self._follow(session, turn_id) if is_stream else None
                whole = await self._ended(session, turn_id)
                again = await self._call(session, "POST", "", body, headers)
        except (TimeoutError, LookupError) as error:
            verdict.lost.append(f"{key}: {type(error).__name__} {error}")
            return
        if again["id"] != turn_id:
            verdict.doubled.append(f"{key}: {turn_id} and {again['id']}")
        for what, text in (("kept", _text(whole)), ("streamed", streamed)):
            if text is not None and text != expected:
                verdict.contradicted.append(f"{turn_id}: {what} {text!r} for {expected!r}")

    async def _follow(self, session: aiohttp.ClientSession, turn_id: str) -> str:
        """Read a turn's stream; after each break, continue after the last event."""
        last, text = -1, ""
        while True:
            path = f"/{turn_id}?stream=true&starting_after={last}"
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
            response = await self._call(session, "GET", f"/{turn_id}")
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
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Call routers until one answers."""
        timeout = aiohttp.ClientTimeout(total=60)
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.request(
                    method, self._url(path), json=body, headers=headers, timeout=timeout
                ) as response:
                    if response.status == 200:
                        answer: dict[str, Any] = await response.json()
                        return answer
                    if response.status not in (409, 429, 500, 503, 504):
                        raise LookupError(f"{response.status} {await response.text()}")
            await asyncio.sleep(_ASK_AGAIN_S)

    def _url(self, path: str) -> str:
        return f"{self._chance.choice(self._urls)}/v1/responses{path}"


def _text(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message"
        for part in item["content"]
    )  # fmt: skip

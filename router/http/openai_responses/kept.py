"""The stored responses of /v1/responses.

The store keeps each response as a *turn*: one call with its output (`router/stored_turns/turn.py`).
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic_core import from_json

from contract.errors import InvalidArgumentError, NotFoundError, QuireError
from contract.outputs import Event
from contract.request import GenerateRequest
from router.access.tenancy import with_precedence
from router.http.answers.objects import Json
from router.http.idempotency import idempotency_key
from router.http.openai_responses.body import ResponseBody
from router.http.openai_responses.call import (
    ResponseCall,
    body_of,
    head_of,
    prepare,
    restored,
)
from router.http.openai_responses.items import Item, parse_items, with_id
from router.http.strict_json import excerpt, json_bytes
from router.request.cells import Cells
from router.stored_turns.running import Seen
from router.stored_turns.turn import Turn, TurnStatus
from router.stored_turns.turns import Turns

KIND: Final = "response"
MAX_LISTED: Final = 100


@dataclass(frozen=True, slots=True)
class KeptResponses:
    """Stores and reads the responses of all tenants.

    This class is the `TurnKind` of responses: `Turns` calls `answer`, `request`, `result` and
    `failure`.
    """

    cells: Cells
    turns: Turns
    max_bytes: int
    """Maximum size in bytes of a conversation that a new response continues."""

    # --- TurnKind -------------------------------------------------------------------------------

    async def answer(self, turn: Turn) -> None:
        """Return None, so that `Turns` submits the turn's request to a scheduler."""

    async def request(self, turn: Turn) -> GenerateRequest:
        """Return the request to submit for a queued turn."""
        body = await body_of(turn)
        head = head_of(body, turn.id, turn.created_at, turn.model, store=True)
        earlier = await self.earlier(turn.tenant, turn.previous_id)
        call = await prepare(self.cells.of(turn.model), body, head, earlier)
        return replace(call.planned, tenant=turn.tenant, priority=turn.priority)

    async def result(
        self, turn: Turn, status: TurnStatus, events: Sequence[Event], at: float
    ) -> bytes:
        """Return the response's JSON."""
        del status  # the events include the failure
        inference = await self.cells.known(turn.model)
        made = (await restored(inference, turn)).events(inference)
        for event in events:
            made.take(event, lambda: at)
        return json_bytes(made.response)

    def failure(self, turn: Turn, error: QuireError) -> bytes:
        """Return the JSON of a failed response, after `result` has raised `error`."""
        try:
            body = ResponseBody.model_validate_json(turn.body)
            head = head_of(body, turn.id, turn.created_at, turn.model, store=True)
        except Exception:  # noqa: BLE001 - another version wrote the turn
            head = {"id": turn.id, "created_at": int(turn.created_at), "model": turn.model}
        told = {"code": "server_error", "message": str(error)}
        return json_bytes({**unfinished(head, "failed"), "error": told})

    # --- for the routes -------------------------------------------------------------------------

    async def accept(
        self, body: ResponseBody, response_id: str, tenant: str, headers: Mapping[str, str]
    ) -> tuple[Turn, ResponseCall]:
        """Store and start a response; return its turn and its call. May raise QuireError.

        If an older response has the idempotency key of `headers`, returns the older response's turn
        and call.
        """
        created_at = time.time()
        kept = json_bytes(
            {
                **body.model_dump(mode="json", by_alias=True, exclude_unset=True),
                "input": [with_id(item) for item in body.items],
            }
        )
        inference = self.cells.of(body.model)
        model = inference.model.info(body.model).id
        head = head_of(body, response_id, created_at, model, store=True)
        earlier = await self.earlier(tenant, body.previous_response_id)
        call = await prepare(inference, body, head, earlier)
        call = replace(call, request=with_precedence(call.request, headers))
        turn = Turn(
            id=response_id,
            tenant=tenant,
            kind=KIND,
            body=kept,
            created_at=created_at,
            previous_id=body.previous_response_id,
            idempotency_key=idempotency_key(headers),
            fingerprint=hashlib.sha256(body.model_dump_json().encode()).digest(),
        )
        try:
            accepted = await self.turns.accept(turn, call.planned)
        except InvalidArgumentError as error:
            raise call.named(error) from error
        if accepted.id != response_id:
            call = await restored(await self.cells.known(accepted.model), accepted)
        return accepted, call

    async def earlier(self, tenant: str, previous_id: str | None) -> list[Item]:
        """Return the items of the turns that a new response continues; may raise QuireError."""
        if previous_id is None:
            return []
        turns = await self.turns.store.conversation(tenant, previous_id, self.max_bytes)
        if not turns:
            raise NotFoundError(
                f"previous_response_id is {excerpt(previous_id)}; this response, or one before"
                " it, is not kept or has been deleted"
            )
        return await asyncio.to_thread(_items_of, turns)

    async def find(self, tenant: str, response_id: str) -> Turn:
        return await self.turns.find(tenant, response_id, KIND)

    def read(self, turn: Turn, seen: Seen) -> AsyncGenerator[Event, None]:
        return self.turns.read(turn, seen)

    async def whole(self, turn: Turn, call: ResponseCall) -> bytes:
        """Wait for a response's end, and return its JSON."""
        made, seen = call.events(self.cells.of(turn.model)), Seen()
        async with aclosing(self.read(turn, seen)) as events:
            async for event in events:
                made.take(event, seen.end)
        return json_bytes(made.response)

    async def shown(self, turn: Turn) -> bytes:
        """Return the current JSON of a response; the output is empty until the response ends."""
        if turn.result is not None:
            return turn.result
        body = await body_of(turn)
        head = head_of(body, turn.id, turn.created_at, turn.model, store=True)
        status = "queued" if turn.status is TurnStatus.QUEUED else "in_progress"
        return json_bytes(unfinished(head, status))


def unfinished(head: Json, status: str) -> Json:
    """Return the JSON of a response without output."""
    return {
        **head,
        "object": "response",
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def input_of(turn: Turn) -> list[dict[str, Any]]:
    """Return the JSON of a response's input items, in OpenAI's format."""
    items: list[dict[str, Any]] = from_json(turn.body)["input"]
    return items


def _items_of(turns: Sequence[Turn]) -> list[Item]:
    items: list[Item] = []
    for turn in turns:
        if turn.kind != KIND or turn.result is None:
            raise InvalidArgumentError(
                "previous_response_id", f"names {turn.id}, which has not ended"
            )
        items += parse_items(input_of(turn))
        if output := from_json(turn.result)["output"]:
            items += parse_items(output)
    return items

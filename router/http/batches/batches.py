"""Accepts batches; ends them with their lines, at the end of their window, or when cancelled."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Container, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from contract.errors import InvalidArgumentError, NotFoundError, QuireError
from router.http.answers.objects import Json
from router.http.batches.lines import (
    KIND,
    WINDOW_S,
    BatchLines,
    parse_line,
    turn_of_line,
    unanswered_line,
)
from router.http.batches.store import Batch, BatchStore, File
from router.http.strict_json import excerpt
from router.request.cells import Cells
from router.turns.turn import Turn, TurnStatus
from router.turns.turns import Turns

log = structlog.get_logger()

MAX_LINES: Final = 50_000
MAX_SHOWN_ERRORS: Final = 10
_TICK_S: Final = 1.0
_SWEEP_S: Final = 600.0
_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Batches:
    """The files and batches of one router's clients."""

    cells: Cells
    turns: Turns
    retention_s: float
    tick_s: float = _TICK_S

    def __post_init__(self) -> None:
        self.turns.serve(KIND, BatchLines(self.cells))

    @property
    def store(self) -> BatchStore:
        return BatchStore(self.turns.store.database)

    async def file(self, tenant: str, file_id: str) -> File:
        """Return a file; raises NotFoundError."""
        file = await self.store.file(tenant, file_id)
        if file is None:
            raise NotFoundError(f"file {excerpt(file_id)} is not kept, or has been deleted")
        return file

    async def content(self, tenant: str, file_id: str) -> bytes:
        """Return what a file holds; raises NotFoundError."""
        content = await self.store.content(tenant, file_id)
        if content is None:
            raise NotFoundError(f"file {excerpt(file_id)} is not kept, or has been deleted")
        return content

    async def create(
        self, tenant: str, file_id: str, endpoint: str, metadata: Mapping[str, str]
    ) -> Json:
        """Keep a batch and its lines; from then on it is computed to its end."""
        content = await self.content(tenant, file_id)
        batch_id, now = f"batch_{uuid.uuid4().hex}", time.time()
        turns, errors = await asyncio.to_thread(
            _read_lines, content, batch_id, tenant, endpoint, now
        )
        shown: Json = {
            "id": batch_id,
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": file_id,
            "completion_window": "24h",
            "created_at": int(now),
            "expires_at": int(now + WINDOW_S),
            "metadata": dict(metadata),
            "errors": {"object": "list", "data": errors} if errors else None,
            "status": "failed" if errors else "in_progress",
            "failed_at" if errors else "in_progress_at": int(now),
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": len(turns), "completed": 0, "failed": 0},
        }
        batch = Batch(batch_id, tenant, now, not errors, shown)
        await self.store.create(batch, [] if errors else turns)
        return shown

    async def find(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch; raises NotFoundError."""
        batch = await self.store.batch(tenant, batch_id)
        if batch is None:
            raise NotFoundError(f"batch {excerpt(batch_id)} is not kept, or has been deleted")
        return batch

    async def shown(self, batch: Batch) -> Json:
        """Return what its client is told now."""
        if not batch.is_live:
            return batch.shown
        counts = await self.turns.store.count_group(batch.tenant, batch.id)
        return {**batch.shown, "request_counts": _counts(counts)}

    async def cancel(self, batch: Batch) -> Json:
        """Begin no more of its lines; those that run are ended soon."""

        def change(shown: Json) -> Json:
            return {**shown, "status": "cancelling", "cancelling_at": int(time.time())}

        await self.store.change(batch, change)
        return await self.shown(await self.find(batch.tenant, batch.id))

    # --- to the end -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Look after the batches that have not ended; several routers may do so at once."""
        next_sweep = time.monotonic() + _SWEEP_S
        while True:
            await asyncio.sleep(self.tick_s)
            try:
                for batch in await self.store.batches(is_live=True):
                    try:
                        await self._advance(batch)
                    except QuireError as error:
                        log.warning("batch is looked after later", batch=batch.id, error=str(error))
                    except Exception:
                        log.exception("batch cannot be looked after", batch=batch.id)
                if time.monotonic() >= next_sweep:
                    next_sweep = time.monotonic() + _SWEEP_S
                    await self.store.sweep(self.retention_s)
            except QuireError as error:
                log.warning("batches are looked after later", error=str(error))

    async def _advance(self, batch: Batch) -> None:
        is_late = time.time() >= batch.created_at + WINDOW_S
        is_stopping = is_late or batch.shown["status"] == "cancelling"
        if is_stopping:
            await self.store.end_queued(batch)
        counts = await self.turns.store.count_group(batch.tenant, batch.id)
        if any(num for status, num in counts.items() if not status.has_ended):
            if is_stopping:
                async for turn in self._turns(batch):
                    if not turn.status.has_ended:
                        await self.turns.cancel(turn)
            return
        await self._end(batch, counts, "expired" if is_late else "")

    async def _turns(self, batch: Batch) -> AsyncIterator[Turn]:
        first = 0
        while found := await self.turns.store.list_group(
            batch.tenant, batch.id, first_position=first, limit=_PAGE
        ):
            for turn in found:
                yield turn
            first = found[-1].position + 1

    async def _end(self, batch: Batch, counts: Mapping[TurnStatus, int], why: str) -> None:
        status = why or ("cancelled" if batch.shown["status"] == "cancelling" else "completed")
        kinds: dict[str, list[bytes]] = {"output": [], "error": []}
        async for turn in self._turns(batch):
            if turn.status is TurnStatus.COMPLETED and turn.result is not None:
                kinds["output"].append(turn.result)
            elif turn.status is TurnStatus.FAILED and turn.result is not None:
                kinds["error"].append(turn.result)
            elif status == "expired":
                kinds["error"].append(
                    unanswered_line(turn, "batch_expired", "the batch's window was over before")
                )
            else:
                kinds["error"].append(
                    unanswered_line(turn, "batch_cancelled", "the batch was cancelled before")
                )
        now = time.time()
        shown = {
            **batch.shown,
            "status": status,
            f"{status}_at": int(now),
            "finalizing_at": int(now),
            "request_counts": _counts(counts),
        }
        files = []
        for kind, lines in kinds.items():
            if lines:
                content = b"\n".join([*lines, b""])
                name = f"{batch.id}_{kind}.jsonl"
                file_id = f"file-{uuid.uuid4().hex}"
                files.append(
                    (File(file_id, batch.tenant, "batch_output", name, len(content), now), content)
                )
                shown[f"{kind}_file_id"] = file_id
        await self.store.end(batch, shown, files)
        log.info("batch ended", batch=batch.id, status=status)


def _counts(counts: Mapping[TurnStatus, int]) -> Json:
    completed = counts.get(TurnStatus.COMPLETED, 0)
    failed = counts.get(TurnStatus.FAILED, 0)
    return {"total": sum(counts.values()), "completed": completed, "failed": failed}


def _read_lines(
    content: bytes, batch_id: str, tenant: str, endpoint: str, created_at: float
) -> tuple[list[Turn], list[Json]]:
    """Return a file's lines as turns, and what is wrong with them."""
    turns: list[Turn] = []
    errors: list[Json] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        if len(errors) == MAX_SHOWN_ERRORS or len(turns) > MAX_LINES:
            break
        try:
            custom_id = _checked(text, endpoint, seen)
        except InvalidArgumentError as error:
            errors.append(_problem("invalid_line", str(error), number, error.field))
            continue
        seen.add(custom_id)
        turns.append(turn_of_line(batch_id, tenant, number, text, created_at))
    if len(turns) > MAX_LINES:
        errors.append(_problem("too_many_lines", f"the file has more lines than {MAX_LINES}"))
    if not turns and not errors:
        errors.append(_problem("empty_file", "the file has no lines"))
    return turns, errors


def _problem(code: str, message: str, line: int | None = None, param: str | None = None) -> Json:
    return {"code": code, "line": line, "message": message, "param": param}


def _checked(text: bytes, endpoint: str, seen: Container[str]) -> str:
    """Return a line's custom_id; raises InvalidArgumentError."""
    asked = parse_line(text)
    if asked["url"] != endpoint:
        raise InvalidArgumentError("url", f"is {excerpt(asked['url'])}, not the batch's")
    custom_id: str = asked["custom_id"]
    if custom_id in seen:
        raise InvalidArgumentError("custom_id", "is that of a line before")
    return custom_id

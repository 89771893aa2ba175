"""Accepts batches, and ends each batch when it is complete, expired or cancelled.

Each line of a batch becomes a turn: a stored call, which any router can complete.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, cast

import structlog

from contract.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
)
from router.access.api_keys import key_of_call
from router.access.tenancy import TENANT_KEY
from router.http.answers.objects import Json
from router.http.batches.lines import (
    EMBEDDINGS_KIND,
    KIND,
    WINDOW_S,
    BatchLines,
    parse_line,
    turn_of_line,
    unanswered_line,
)
from router.http.batches.store import SLICE, VALIDATING, Batch, BatchStore, File
from router.http.idempotency import CallKey
from router.http.strict_json import excerpt
from router.live.usage import Used
from router.request.cells import Cells
from router.stored_turns.turn import Turn, TurnStatus
from router.stored_turns.turns import Turns

log = structlog.get_logger()

MAX_LINES: Final = 50_000
MAX_SHOWN_ERRORS: Final = 10
_TICK_S: Final = 1.0
_SWEEP_S: Final = 600.0
MAX_RESULT_BYTES: Final = 128 * 2**20
"""Limit on the bytes of a batch's results, which the database writes as one value.

On two busy cores, PostgreSQL took 32 s to write this many bytes and 5 s to read them.
"""
_TOO_LARGE: Final = (
    "results_too_large",
    f"the batch's results have more than {MAX_RESULT_BYTES} bytes, which is the limit",
)
_UNANSWERED: Final = {
    "expired": ("batch_expired", "the batch expired before this line was answered"),
    "failed": _TOO_LARGE,
}
"""Maps a batch's status to the error of its unanswered lines; the default is `_CANCELLED`."""
_CANCELLED: Final = "batch_cancelled", "the batch was cancelled before this line was answered"
_KINDS: Final = {TurnStatus.COMPLETED: "output", TurnStatus.FAILED: "error"}
"""Maps a turn's status to the result file for the turn's line."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Creates, shows, cancels and ends batches, and finds files, for the clients of one router."""

    cells: Cells
    turns: Turns
    retention_s: float
    max_line_bytes: int
    """Limit on the bytes of a line, the same as for the body of an HTTP call."""
    tick_s: float = _TICK_S

    def __post_init__(self) -> None:
        for kind in (KIND, EMBEDDINGS_KIND):
            self.turns.serve(kind, BatchLines(self.cells))

    @property
    def store(self) -> BatchStore:
        return BatchStore(self.turns.store.database)

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Return the tenant of a call with these headers."""
        return self.cells.shared.tenant_of(headers.get(TENANT_KEY, ""))

    async def file(self, tenant: str, file_id: str) -> File:
        """Return a file; raises NotFoundError if the file is not stored."""
        file = await self.store.file(tenant, file_id)
        if file is None:
            raise NotFoundError(f"file {excerpt(file_id)} is not kept, or has been deleted")
        return file

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            NotFoundError: There is no such file.
            FailedPreconditionError: A batch's lines are still being read from the file.
        """
        file = await self.file(tenant, file_id)
        for batch in await self.store.live_batches():
            is_its = (batch.tenant, batch.file_id) == (tenant, file_id)
            if is_its and batch.shown["status"] == VALIDATING:
                raise FailedPreconditionError(
                    f"file {file_id} is being read for {batch.id}; delete it later"
                )
        await self.store.delete_file(file.tenant, file.id)

    async def content(self, tenant: str, file_id: str) -> bytes:
        """Return a file's contents; raises NotFoundError if the file is not stored."""
        content = await self.store.content(tenant, file_id)
        if content is None:
            raise NotFoundError(f"file {excerpt(file_id)} is not kept, or has been deleted")
        return content

    async def create(
        self,
        tenant: str,
        file_id: str,
        endpoint: str,
        metadata: Mapping[str, str],
        output_expires_s: float | None = None,
        call: CallKey | None = None,
    ) -> Json:
        """Store a batch, and return its JSON.

        A stored batch is completed even if processes crash.

        If `call` created a batch at an earlier attempt, return the JSON of the earlier batch.

        Raises:
            AlreadyExistsError: A different call has the same idempotency key.
            NotFoundError: There is no such file.
        """
        if call is not None and (known := await self.store.created_by(tenant, call)) is not None:
            return await self.shown(await self.find(tenant, known))
        content = await self.content(tenant, file_id)
        num_lines, errors = await asyncio.to_thread(
            _checked_lines, content, endpoint, self.max_line_bytes
        )
        batch_id, now = f"batch_{uuid.uuid4().hex}", time.time()
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
            "status": "failed" if errors else VALIDATING,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": num_lines, "completed": 0, "failed": 0},
            **({"failed_at": int(now)} if errors else {}),
        }
        key_name = key_of_call()
        batch = Batch(batch_id, tenant, now, not errors, shown, key_name, output_expires_s)
        created = await self.store.create(batch, call)
        return shown if created == batch_id else await self.shown(await self.find(tenant, created))

    async def find(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch; raises NotFoundError if the batch is not stored."""
        batch = await self.store.batch(tenant, batch_id)
        if batch is None:
            raise NotFoundError(f"batch {excerpt(batch_id)} is not kept, or has been deleted")
        return batch

    async def shown(self, batch: Batch) -> Json:
        """Return a batch as its client sees it now."""
        if not batch.is_live:
            return batch.shown
        counts = await self.turns.store.count_group(batch.id)
        return {**batch.shown, **_progress(batch, counts.completed, counts.failed, counts.used)}

    async def cancel(self, batch: Batch) -> Json:
        """Cancel a batch: end its running lines, and start no more of its lines."""

        def change(shown: Json) -> Json:
            return {**shown, "status": "cancelling", "cancelling_at": int(time.time())}

        await self.store.change(batch, change)
        return await self.shown(await self.find(batch.tenant, batch.id))

    # --- completion -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Advance all live batches, every `tick_s`; several routers may do so at once."""
        next_sweep = 0.0
        broken: set[str] = set()  # retried at the next sweep
        while True:
            await asyncio.sleep(self.tick_s)
            try:
                for batch in await self.store.live_batches():
                    if batch.id in broken:
                        continue
                    try:
                        await self._advance(batch)
                    except QuireError as error:
                        log.warning("batch will be retried", batch=batch.id, error=str(error))
                    except Exception:
                        log.exception("batch cannot be advanced", batch=batch.id)
                        broken.add(batch.id)
                if time.monotonic() >= next_sweep:
                    next_sweep = time.monotonic() + _SWEEP_S
                    broken.clear()
                    await self.store.sweep(self.retention_s)
                    await self.store.clear_all()
            except QuireError as error:
                log.warning("batches will be retried", error=str(error))

    async def _advance(self, batch: Batch) -> None:
        is_late = time.time() >= batch.created_at + WINDOW_S
        counts = await self.turns.store.count_group(batch.id)
        is_too_large = counts.result_bytes > MAX_RESULT_BYTES
        is_stopping = is_late or is_too_large or batch.shown["status"] == "cancelling"
        if is_stopping:
            await self.store.end_queued(batch)
        elif batch.shown["status"] == VALIDATING:
            await self._fill(batch)
            return
        if await self.turns.store.is_group_live(batch.id):
            if is_stopping:
                async for found in self._pages(batch):
                    for turn in found:
                        if not turn.status.has_ended:
                            await self.turns.cancel(turn)
            return
        await self._end(batch, "failed" if is_too_large else "expired" if is_late else "")

    async def _fill(self, batch: Batch) -> None:
        """Make a turn of each line of a batch.

        If the router dies, another router continues after the last line that has a turn.
        """
        content = await self.store.content(batch.tenant, batch.file_id)
        if content is None:
            log.warning("input file of a batch is missing", batch=batch.id)
            await self.cancel(batch)
            return
        last = await self.store.last_position(batch)
        left = (
            turn_of_line(batch, number, text)
            for number, text in _numbered(content)
            if number > last
        )
        while turns := await asyncio.to_thread(list, islice(left, SLICE)):
            if not await self.store.fill(batch, turns):
                return
        await self.store.change(
            batch,
            lambda shown: (
                {**shown, "status": "in_progress", "in_progress_at": int(time.time())}
                if shown["status"] == VALIDATING
                else shown
            ),
        )

    async def _pages(self, batch: Batch) -> AsyncIterator[Sequence[Turn]]:
        first = 0
        while found := await self.turns.store.list_group(
            batch.tenant, batch.id, first_position=first
        ):
            yield found
            first = found[-1].position + 1

    async def _end(self, batch: Batch, why: str) -> None:
        status = why or ("cancelled" if batch.shown["status"] == "cancelling" else "completed")
        results = _Results()
        async for found in self._pages(batch):
            await asyncio.to_thread(results.add, found, status)
        used = (await self.turns.store.count_group(batch.id)).used
        if results.is_full:  # the last line may have ended after the check in `_advance`
            status = "failed"
        now = time.time()
        shown = {
            **batch.shown,
            "status": status,
            f"{status}_at": int(now),
            "finalizing_at": int(now),
            **_progress(batch, results.num_completed, results.num_failed, used),
        }
        if results.is_full:
            shown["errors"] = {"object": "list", "data": [_problem(*_TOO_LARGE)]}
        files = []
        for kind, content in results.contents.items():
            if content:
                name = f"{batch.id}_{kind}.jsonl"
                file_id = f"file-{uuid.uuid4().hex}"
                kept_s = batch.output_expires_s
                expires_at = None if kept_s is None else now + kept_s
                file = File(
                    file_id, batch.tenant, "batch_output", name, len(content), now, expires_at
                )
                files.append((file, content))
                shown[f"{kind}_file_id"] = file_id
        await self.store.end(batch, shown, files)
        await self.store.clear(batch)
        log.info("batch ended", batch=batch.id, status=status)


def _progress(batch: Batch, num_completed: int, num_failed: int, used: Used) -> Json:
    """Return the fields that change while a batch is answered."""
    return {
        "request_counts": {
            "total": cast(Json, batch.shown["request_counts"])["total"],
            "completed": num_completed,
            "failed": num_failed,
        },
        "usage": {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens},
            "output_tokens": used.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
            "total_tokens": used.prompt_tokens + used.generated_tokens,
        },
    }


@dataclass(slots=True)
class _Results:
    """Builds the result files of a batch."""

    contents: Mapping[str, bytearray] = field(
        default_factory=lambda: {"output": bytearray(), "error": bytearray()}
    )
    is_full: bool = False
    """Whether a result was left out because the results would exceed `MAX_RESULT_BYTES`."""
    num_completed: int = 0
    num_failed: int = 0
    _num_bytes: int = 0

    def add(self, turns: Sequence[Turn], status: str) -> None:
        """Add a line for each turn; beyond `MAX_RESULT_BYTES`, add an error instead of a result."""
        for turn in turns:
            kind, text = _KINDS.get(turn.status, "error"), turn.result
            if turn.status not in _KINDS or text is None:
                text = unanswered_line(turn, *_UNANSWERED.get(status, _CANCELLED))
            else:
                if self._num_bytes + len(text) > MAX_RESULT_BYTES:
                    self.is_full = True
                    kind, text = "error", unanswered_line(turn, *_TOO_LARGE)
                else:
                    self._num_bytes += len(text)
                self.num_completed += kind == "output"
                self.num_failed += kind == "error"
            self.contents[kind] += text
            self.contents[kind] += b"\n"


def _numbered(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines that are not empty, with their numbers."""
    for number, text in enumerate(content.splitlines(), 1):
        if text.strip():
            yield number, text


def _checked_lines(content: bytes, endpoint: str, max_bytes: int) -> tuple[int, list[Json]]:
    """Return the number of lines, and the batch's `errors`: those of lines and of the whole file.

    The check ends early, and the number is too small, if there are too many errors or lines.
    """
    errors: list[Json] = []
    seen: set[str] = set()
    num_lines = 0
    for number, text in _numbered(content):
        num_lines += 1
        if len(errors) == MAX_SHOWN_ERRORS or num_lines > MAX_LINES:
            break
        try:
            seen.add(_checked(text, endpoint, seen, max_bytes))
        except InvalidArgumentError as error:
            errors.append(_problem("invalid_line", str(error), number, error.field))
    if num_lines > MAX_LINES:
        errors.append(_problem("too_many_lines", f"the file has more than {MAX_LINES} lines"))
    if not num_lines:
        errors.append(_problem("empty_file", "the file has no lines"))
    return num_lines, errors


def _problem(code: str, message: str, line: int | None = None, param: str | None = None) -> Json:
    return {"code": code, "line": line, "message": message, "param": param}


def _checked(text: bytes, endpoint: str, seen: Container[str], max_bytes: int) -> str:
    """Return a line's custom_id; raises InvalidArgumentError if the line is invalid."""
    if len(text) > max_bytes:
        raise InvalidArgumentError(
            "line", f"has {len(text)} bytes; it must have at most {max_bytes} (--max-body-mb)"
        )
    asked = parse_line(text)
    if asked["url"] != endpoint:
        raise InvalidArgumentError(
            "url", f"is {excerpt(asked['url'])}; it must be the batch's endpoint, {endpoint}"
        )
    custom_id: str = asked["custom_id"]
    if custom_id in seen:
        raise InvalidArgumentError("custom_id", "is the same as in an earlier line")
    return custom_id

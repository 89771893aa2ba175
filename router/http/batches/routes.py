"""The routes of /v1/files and /v1/batches."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from aiohttp import BodyPartReader, web
from pydantic import Field, ValidationError

from contract.errors import InvalidArgumentError
from router.access.tenancy import TENANT_KEY
from router.http.answers.objects import Json
from router.http.batches.batches import Batches
from router.http.batches.store import File
from router.http.body import BodyReader
from router.http.endpoint import CallId, endpoint, json_response
from router.http.errors import (
    BodyTooLargeError,
    UnsupportedMediaTypeError,
    error_from_validation,
)
from router.http.idempotency import call_key
from router.http.listing import page
from router.http.requests.schema import MAX_METADATA
from router.http.strict_json import Schema, at_most, excerpt

FILES: Final = "/v1/files"
MAX_FILE_BYTES: Final = 64 * 1024 * 1024
MAX_LISTED: Final = 10_000
_MAX_PURPOSE_BYTES: Final = 64
_PURPOSE: Final = "batch"
_EXPIRY_FIELDS: Final = {f"expires_after[{name}]": name for name in ("anchor", "seconds")}
MIN_EXPIRES_S: Final = 3600
MAX_EXPIRES_S: Final = 30 * 86400


class ExpiresAfter(Schema):
    """How long a file is kept, from when it is created."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]


class _FileFields(Schema):
    expires_after: ExpiresAfter


class BatchBody(Schema):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA), Field(default_factory=dict)]
    output_expires_after: ExpiresAfter | None = None


def batch_routes(batches: Batches, bodies: BodyReader) -> list[web.RouteDef]:
    """Return the routes."""
    store = batches.store

    def tenant_of(request: web.Request) -> str:
        return batches.cells.entry.tenant_of(request.headers.get(TENANT_KEY, ""))

    async def upload_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Upload a file of requests, of at most 64 MiB."""
        name, content, kept_s = await _uploaded(request)
        fingerprint = await asyncio.to_thread(_fingerprint, name, kept_s, content)
        call = call_key(request.headers, fingerprint)
        now = time.time()
        file = File(
            f"file-{uuid.uuid4().hex}",
            tenant_of(request),
            _PURPOSE,
            name,
            len(content),
            now,
            None if kept_s is None else now + kept_s,
        )
        file_id = await store.add_file(file, content, call)
        return json_response(_file_json(await batches.file(file.tenant, file_id)))

    async def list_files(request: web.Request, _: CallId) -> web.StreamResponse:
        """List the stored files, newest first."""
        purpose = request.query.get("purpose")
        files = await store.files(tenant_of(request))
        shown = [_file_json(file) for file in files if purpose in (None, file.purpose)]
        return json_response(page(shown, request.query, most=MAX_LISTED))

    async def get_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Describe a file."""
        file = await batches.file(tenant_of(request), request.match_info["id"])
        return json_response(_file_json(file))

    async def get_content(request: web.Request, _: CallId) -> web.StreamResponse:
        """Return a file's contents."""
        content = await batches.content(tenant_of(request), request.match_info["id"])
        return web.Response(body=content, content_type="application/octet-stream")

    async def delete_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Delete a file. Batches made from it continue."""
        file_id = request.match_info["id"]
        await batches.delete_file(tenant_of(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Answer the requests of a file, at the lowest priority, within a day."""
        body = await bodies.read(request, BatchBody)
        expires = body.output_expires_after
        created = await batches.create(
            tenant_of(request),
            body.input_file_id,
            body.endpoint,
            body.metadata,
            None if expires is None else expires.seconds,
            call_key(request.headers, hashlib.sha256(body.model_dump_json().encode()).digest()),
        )
        return json_response(created)

    async def list_batches(request: web.Request, _: CallId) -> web.StreamResponse:
        """List the stored batches, newest first."""
        found = await store.batches(tenant=tenant_of(request))
        told = page([batch.shown for batch in found], request.query, most=MAX_LISTED)
        id_to_batch = {batch.id: batch for batch in found}
        told["data"] = [await batches.shown(id_to_batch[each["id"]]) for each in told["data"]]
        return json_response(told)

    async def get_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Describe a batch and its progress."""
        batch = await batches.find(tenant_of(request), request.match_info["id"])
        return json_response(await batches.shown(batch))

    async def cancel_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Cancel a batch; finished lines keep their results."""
        batch = await batches.find(tenant_of(request), request.match_info["id"])
        return json_response(await batches.cancel(batch))

    return [
        web.post(FILES, endpoint(upload_file)),
        web.get(FILES, endpoint(list_files)),
        web.get(FILES + "/{id}", endpoint(get_file)),
        web.get(FILES + "/{id}/content", endpoint(get_content)),
        web.delete(FILES + "/{id}", endpoint(delete_file)),
        web.post("/v1/batches", endpoint(create_batch)),
        web.get("/v1/batches", endpoint(list_batches)),
        web.get("/v1/batches/{id}", endpoint(get_batch)),
        web.post("/v1/batches/{id}/cancel", endpoint(cancel_batch)),
    ]


def _fingerprint(name: str, kept_s: int | None, content: bytes) -> bytes:
    fields = f"{kept_s} {len(name)} {name} ".encode(errors="replace")
    return hashlib.sha256(fields + hashlib.sha256(content).digest()).digest()


async def _uploaded(request: web.Request) -> tuple[str, bytes, int | None]:
    """Return a file's name, its contents, and how many seconds it is kept."""
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaTypeError(
            f"Content-Type is {excerpt(request.content_type)}; it must be multipart/form-data"
        )
    name, content, purpose = "", None, None
    expiry: dict[str, str] = {}
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader):
            raise InvalidArgumentError("body", "has nested parts, which are not supported")
        if part.name == "purpose":
            purpose = (await _read(part, _MAX_PURPOSE_BYTES)).decode(errors="replace")
        elif part.name == "file":
            name, content = part.filename or "", await _read(part, MAX_FILE_BYTES)
        elif part.name in _EXPIRY_FIELDS:
            text = await _read(part, _MAX_PURPOSE_BYTES)
            expiry[_EXPIRY_FIELDS[part.name]] = text.decode(errors="replace")
        else:
            raise InvalidArgumentError(str(part.name), "is set; there is no such field")
    if purpose != _PURPOSE:
        raise InvalidArgumentError("purpose", f'is {excerpt(purpose)}; it must be "{_PURPOSE}"')
    if content is None:
        raise InvalidArgumentError("file", "is missing")
    return name, content, _kept_s(expiry)


def _kept_s(expiry: Mapping[str, str]) -> int | None:
    """Return the seconds of the fields of `expires_after`; raises InvalidArgumentError."""
    if not expiry:
        return None
    try:
        fields = _FileFields.model_validate_strings({"expires_after": expiry}, strict=False)
    except ValidationError as error:
        raise error_from_validation(error) from error
    return fields.expires_after.seconds


async def _read(part: BodyPartReader, most: int) -> bytes:
    content = bytearray()
    while chunk := await part.read_chunk(65536):
        content += chunk
        if len(content) > most:
            raise BodyTooLargeError(f"{part.name} has more than {most} bytes, which is the limit")
    return bytes(content)


def _file_json(file: File) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": None if file.expires_at is None else int(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }

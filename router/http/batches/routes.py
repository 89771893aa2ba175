"""The routes of /v1/files and /v1/batches."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from aiohttp import web
from pydantic import Field, ValidationError

from contract.errors import InvalidArgumentError, QuotaError
from router.access.tenancy import TENANT_KEY
from router.http.answers.objects import Json
from router.http.answers.sse import STARTED
from router.http.batches.batches import Batches
from router.http.batches.places import Places
from router.http.batches.store import File
from router.http.batches.transfers import Upload, receive, send, temporary_file
from router.http.body import BodyReader, check_kind
from router.http.endpoint import CallId, endpoint, json_response
from router.http.errors import REQUEST_ID_HEADER, error_from_validation
from router.http.idempotency import call_key, idempotency_key
from router.http.listing import page_json, page_query
from router.http.requests.schema import MAX_METADATA
from router.http.strict_json import Schema, at_most, excerpt, json_bytes

FILES: Final = "/v1/files"
MAX_STORED_BYTES: Final = 4 * 2**30
"""Limit on all files of a tenant, with the results of its batches, for the next upload."""
_MAX_FILES_LISTED: Final = 10_000
_MAX_BATCHES_LISTED: Final = 100
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
    uploads = Places("uploads", per_tenant=4, in_all=16)
    downloads = Places("downloads", per_tenant=4, in_all=16)
    creations = Places("creations of batches", per_tenant=4, in_all=8)
    reading = asyncio.Lock()
    """Held while memory has a whole file to send."""

    def tenant_of(request: web.Request) -> str:
        return batches.cells.entry.tenant_of(request.headers.get(TENANT_KEY, ""))

    async def check_stored(tenant: str) -> None:
        if (num_stored := await store.file_bytes(tenant)) >= MAX_STORED_BYTES:
            raise QuotaError(
                f"the files of this tenant have {num_stored} bytes; the limit is {MAX_STORED_BYTES}"
            )

    async def upload_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Upload a file of requests, of at most 64 MiB."""
        tenant = tenant_of(request)
        with uploads.take(tenant):
            key = idempotency_key(request.headers)
            if key is None or not await store.has_file_with_key(tenant, key):
                await check_stored(tenant)
            async with temporary_file() as content:
                upload = await receive(request, content, ("purpose", *_EXPIRY_FIELDS))
                if (purpose := upload.fields.get("purpose")) != _PURPOSE:
                    raise InvalidArgumentError(
                        "purpose", f'is {excerpt(purpose)}; it must be "{_PURPOSE}"'
                    )
                kept_s, now = _kept_s(upload.fields), time.time()
                file = File(
                    f"file-{uuid.uuid4().hex}",
                    tenant,
                    _PURPOSE,
                    upload.name,
                    upload.num_bytes,
                    now,
                    None if kept_s is None else now + kept_s,
                )
                call = call_key(request.headers, _fingerprint(upload, kept_s))
                file_id = await store.add_file(file, content, call)
        return json_response(_file_json(await batches.file(tenant, file_id)))

    async def list_files(request: web.Request, _: CallId) -> web.StreamResponse:
        """List the stored files, newest first."""
        query = request.query
        wanted = page_query(query, most=_MAX_FILES_LISTED, default=_MAX_FILES_LISTED)
        files = await store.files(tenant_of(request), wanted, query.get("purpose"))
        body = await asyncio.to_thread(
            lambda: json_bytes(page_json([*map(_file_json, files)], wanted))
        )
        return web.Response(body=body, content_type="application/json")

    async def get_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Describe a file."""
        file = await batches.file(tenant_of(request), request.match_info["id"])
        return json_response(_file_json(file))

    async def get_content(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Return a file's contents."""
        tenant = tenant_of(request)
        with downloads.take(tenant):
            async with temporary_file() as file:
                async with reading:
                    content = await batches.content(tenant, request.match_info["id"])
                    num_bytes = await asyncio.to_thread(file.write, content)
                    del content
                response = web.StreamResponse(headers={REQUEST_ID_HEADER: call_id.value})
                response.content_type = "application/octet-stream"
                response.content_length = num_bytes
                await response.prepare(request)
                request[STARTED] = response
                await send(request, response, file)
        return response

    async def delete_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Delete a file. Batches made from it continue."""
        file_id = request.match_info["id"]
        await batches.delete_file(tenant_of(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Answer the requests of a file, at the lowest priority, within a day."""
        body = await bodies.read(request, BatchBody)
        tenant, expires = tenant_of(request), body.output_expires_after
        with creations.take(tenant):
            created = await batches.create(
                tenant,
                body.input_file_id,
                body.endpoint,
                body.metadata,
                None if expires is None else expires.seconds,
                call_key(request.headers, hashlib.sha256(body.model_dump_json().encode()).digest()),
            )
        return json_response(created)

    async def list_batches(request: web.Request, _: CallId) -> web.StreamResponse:
        """List the stored batches, newest first."""
        wanted = page_query(request.query, most=_MAX_BATCHES_LISTED)
        found = await store.batches(tenant_of(request), wanted)
        told = page_json([batch.shown for batch in found], wanted)
        told["data"] = [await batches.shown(batch) for batch in found[: wanted.limit]]
        return json_response(told)

    async def get_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Describe a batch and its progress."""
        batch = await batches.find(tenant_of(request), request.match_info["id"])
        return json_response(await batches.shown(batch))

    async def cancel_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Cancel a batch; finished lines keep their results."""
        check_kind(request)
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


def _fingerprint(upload: Upload, kept_s: int | None) -> bytes:
    fields = f"{kept_s} {len(upload.name)} {upload.name} ".encode(errors="replace")
    return hashlib.sha256(fields + upload.digest).digest()


def _kept_s(fields: Mapping[str, str]) -> int | None:
    """Return the seconds of the fields of `expires_after`; raises InvalidArgumentError."""
    expiry = {name: fields[field] for field, name in _EXPIRY_FIELDS.items() if field in fields}
    if not expiry:
        return None
    try:
        given = _FileFields.model_validate_strings({"expires_after": expiry}, strict=False)
    except ValidationError as error:
        raise error_from_validation(error) from error
    return given.expires_after.seconds


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

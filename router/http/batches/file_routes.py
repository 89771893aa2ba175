"""The routes of /v1/files."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from aiohttp import web
from pydantic import Field, ValidationError

from contract.errors import InvalidArgumentError, QuotaError
from router.http.answers.objects import Json
from router.http.answers.sse import STARTED
from router.http.batches.batches import Batches
from router.http.batches.concurrency_limit import Places
from router.http.batches.store import File
from router.http.batches.transfers import Upload, receive, send, temporary_file
from router.http.endpoint import CallId, endpoint, json_response
from router.http.errors import REQUEST_ID_HEADER, error_from_validation
from router.http.idempotency import call_key, idempotency_key
from router.http.listing import page_json, page_query
from router.http.strict_json import Schema, excerpt, json_bytes

FILES: Final = "/v1/files"
MAX_STORED_BYTES: Final = 4 * 2**30
"""The quota of a tenant. A tenant cannot upload while its files, with the results of its batches,
have this many bytes or more."""
_MAX_FILES_LISTED: Final = 10_000
_PURPOSE: Final = "batch"
_EXPIRY_FIELDS: Final = {f"expires_after[{name}]": name for name in ("anchor", "seconds")}
MIN_EXPIRES_S: Final = 3600
MAX_EXPIRES_S: Final = 30 * 86400


class ExpiresAfter(Schema):
    """How long a file is kept after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]


class _FileFields(Schema):
    expires_after: ExpiresAfter


def file_routes(batches: Batches) -> list[web.RouteDef]:
    """Return the routes."""
    store = batches.store
    uploads = Places("uploads", per_tenant=4, in_all=16)
    downloads = Places("downloads", per_tenant=4, in_all=16)
    reading = asyncio.Lock()
    """Held while a download has a whole file in memory, so that no other download has one."""

    async def check_stored(tenant: str) -> None:
        if (num_stored := await store.file_bytes(tenant)) >= MAX_STORED_BYTES:
            raise QuotaError(
                f"the files of this tenant have {num_stored} bytes; the limit is {MAX_STORED_BYTES}"
            )

    async def upload_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Upload a file of requests, of at most 64 MiB."""
        tenant = batches.tenant_of(request.headers)
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
        files = await store.files(batches.tenant_of(request.headers), wanted, query.get("purpose"))
        body = await asyncio.to_thread(
            lambda: json_bytes(page_json([*map(_file_json, files)], wanted))
        )
        return web.Response(body=body, content_type="application/json")

    async def get_file(request: web.Request, _: CallId) -> web.StreamResponse:
        """Describe a file."""
        file = await batches.file(batches.tenant_of(request.headers), request.match_info["id"])
        return json_response(_file_json(file))

    async def get_content(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Return a file's contents."""
        tenant = batches.tenant_of(request.headers)
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
        """Delete a file. Batches made from the file continue."""
        file_id = request.match_info["id"]
        await batches.delete_file(batches.tenant_of(request.headers), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return [
        web.post(FILES, endpoint(upload_file)),
        web.get(FILES, endpoint(list_files)),
        web.get(FILES + "/{id}", endpoint(get_file)),
        web.get(FILES + "/{id}/content", endpoint(get_content)),
        web.delete(FILES + "/{id}", endpoint(delete_file)),
    ]


def _fingerprint(upload: Upload, kept_s: int | None) -> bytes:
    fields = f"{kept_s} {len(upload.name)} {upload.name} ".encode(errors="replace")
    return hashlib.sha256(fields + upload.digest).digest()


def _kept_s(fields: Mapping[str, str]) -> int | None:
    """Return the seconds until the file expires (`expires_after`); None: it never expires.

    May raise InvalidArgumentError.
    """
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

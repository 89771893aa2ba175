"""The routes of /v1/batches."""

import hashlib
from typing import Annotated, Final, Literal

from aiohttp import web
from pydantic import Field

from router.http.batches.batches import Batches
from router.http.batches.concurrency_limit import Places
from router.http.batches.file_routes import ExpiresAfter
from router.http.body import BodyReader, check_kind
from router.http.endpoint import CallId, endpoint, json_response
from router.http.idempotency import call_key
from router.http.listing import page_json, page_query
from router.http.requests.shared_fields import MAX_METADATA
from router.http.strict_json import Schema, at_most

_MAX_BATCHES_LISTED: Final = 100


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
    creations = Places("creations of batches", per_tenant=4, in_all=8)

    async def create_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Create a batch: its file's requests are answered at the lowest priority, within a day."""
        body = await bodies.read(request, BatchBody)
        tenant, expires = batches.tenant_of(request.headers), body.output_expires_after
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
        found = await store.batches(batches.tenant_of(request.headers), wanted)
        told = page_json([batch.shown for batch in found], wanted)
        told["data"] = [await batches.shown(batch) for batch in found[: wanted.limit]]
        return json_response(told)

    async def get_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Describe a batch and its progress."""
        batch = await batches.find(batches.tenant_of(request.headers), request.match_info["id"])
        return json_response(await batches.shown(batch))

    async def cancel_batch(request: web.Request, _: CallId) -> web.StreamResponse:
        """Cancel a batch; finished lines keep their results."""
        check_kind(request)
        batch = await batches.find(batches.tenant_of(request.headers), request.match_info["id"])
        return json_response(await batches.cancel(batch))

    return [
        web.post("/v1/batches", endpoint(create_batch)),
        web.get("/v1/batches", endpoint(list_batches)),
        web.get("/v1/batches/{id}", endpoint(get_batch)),
        web.post("/v1/batches/{id}/cancel", endpoint(cancel_batch)),
    ]

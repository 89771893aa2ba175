"""The routes of the OpenAI API."""

import time
from dataclasses import replace

from aiohttp import web

from contract.errors import InvalidArgumentError, ModelNotFoundError, NotFoundError
from router.access.tenancy import with_precedence
from router.http.answers.answer import ClientCall, answer
from router.http.answers.event_ids import LAST_EVENT_ID_HEADER, parse_event_id
from router.http.answers.objects import model_json
from router.http.answers.streaming import use_model
from router.http.anthropic.routes import messages_routes
from router.http.batches.batches import Batches
from router.http.batches.file_routes import FILES, file_routes
from router.http.batches.routes import batch_routes
from router.http.body import BodyReader
from router.http.embeddings import embedding_routes
from router.http.endpoint import CallId, endpoint, is_resumable, json_response
from router.http.errors import REQUEST_ID_HEADER, MethodNotAllowedError
from router.http.openai_responses.routes import responses_routes
from router.http.requests.chat import ChatBody, chat_call
from router.http.requests.completions import CompletionBody, completion_call
from router.http.usage import USAGE, usage_route
from router.http.vllm_routes import vllm_routes
from router.operators.adapters_and_models import Operations
from router.operators.usage import UsageReports
from router.request.cells import Cells
from router.request.inference import Inference
from router.stored_turns.turns import Turns

OPERATOR_PATHS = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", USAGE, FILES))
"""Routes that a router without API keys always refuses to web pages of other sites (`PageGuard`).

The router refuses all other routes to these pages only if it listens on loopback. `FILES` is in the
list because a browser lets a page upload a file to another site without a preflight request.
"""


def routes(
    cells: Cells,
    operations: Operations,
    *,
    max_body_bytes: int,
    may_be_compressed: bool = False,
    turns: Turns | None = None,
    batches: Batches | None = None,
    usage: UsageReports | None = None,
) -> list[web.AbstractRouteDef]:
    """Return the routes below /v1, and vLLM's routes outside /v1.

    If `turns` is None, responses are not stored. If `batches` is None, the routes of files and
    batches are left out. If `usage` is None, the route of usage reports is left out.

    The `AppRunner` needs `handler_cancellation=True`. With this option, aiohttp cancels the handler
    of a client that disconnects, and the handler cancels the client's requests.
    """
    created = int(time.time())
    bodies = BodyReader(cells, max_body_bytes, may_be_compressed)

    def begins(request: web.Request) -> bool:
        return LAST_EVENT_ID_HEADER not in request.headers  # otherwise the call resumes a stream

    async def used(
        request: web.Request, call_id: CallId, body: CompletionBody | ChatBody
    ) -> Inference:
        headers = {REQUEST_ID_HEADER: call_id.value}
        return await use_model(cells, body.model, request, headers, is_streamed=bool(body.stream))

    async def create_completion(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Continue one or more prompts; stream server-sent events if `stream` is set."""
        body = await bodies.read(request, CompletionBody, generates=begins(request))
        call_id.value = body.request_id or call_id.value
        inference = await used(request, call_id, body)
        call = completion_call(inference, body, call_id.value)
        return await answer(request, inference, _with_headers(call, request))

    async def create_chat(request: web.Request, call_id: CallId) -> web.StreamResponse:
        """Answer a chat, using the model's chat template."""
        body = await bodies.read(request, ChatBody, generates=begins(request))
        call_id.value = body.request_id or call_id.value
        inference = await used(request, call_id, body)
        if begins(request):
            inference.check_room(body.model)  # before the template is rendered
        call = await chat_call(inference, body, call_id.value)
        return await answer(request, inference, _with_headers(call, request))

    async def list_models(_: web.Request, __: CallId) -> web.Response:
        """List the served models."""
        models = [model_json(model, created) for model in cells.infos()]
        return json_response({"object": "list", "data": models})

    async def get_model(request: web.Request, _: CallId) -> web.Response:
        """Describe one model."""
        model_id = request.match_info["id"]
        models = cells.infos()
        for model in models:
            if model.id == model_id:
                return json_response(model_json(model, created))
        raise ModelNotFoundError(model_id, [model.id for model in models])

    async def refuse(request: web.Request, _: CallId) -> web.Response:
        if request.path in paths:
            raise MethodNotAllowedError(f"{request.path} does not support {request.method}")
        raise NotFoundError(f"there is no {request.method} {request.path}")

    served = [
        web.post("/v1/completions", endpoint(create_completion)),
        web.post("/v1/chat/completions", endpoint(create_chat)),
        web.get("/v1/models", endpoint(list_models)),
    ]
    served += vllm_routes(cells, operations, bodies)
    served += responses_routes(cells, bodies, turns)
    served += messages_routes(cells, bodies)
    if batches is not None:
        served += file_routes(batches)
        served += batch_routes(batches, bodies)
    if usage is not None:
        served.append(usage_route(usage))
    served += embedding_routes(cells, bodies)
    paths = {route.path for route in served}
    return [
        *served,
        web.get("/v1/models/{id:.+}", endpoint(get_model)),  # ids may hold slashes
        web.route("*", "/v1/{path:.*}", endpoint(refuse)),
        *(web.route("*", path, endpoint(refuse)) for path in sorted(paths)),
    ]


def _with_headers(call: ClientCall, http: web.Request) -> ClientCall:
    """Return the call with what the HTTP headers say about it.

    The headers have the priority and the tenant, and say whether the stream is resumable and after
    which event to resume it.
    """
    resumable = is_resumable(http)
    call = replace(
        call,
        requests=[
            replace(with_precedence(request, http.headers), resumable=resumable)
            for request in call.requests
        ],
    )
    last = http.headers.get(LAST_EVENT_ID_HEADER)
    return call if last is None else _resumed(call, last)


def _resumed(call: ClientCall, last_event_id: str) -> ClientCall:
    request_id, received = parse_event_id(last_event_id)
    requests = [
        replace(request, request_id=request_id, resumable=True) for request in call.requests
    ]
    call = replace(call, request_id=request_id, requests=requests, received=received)
    if not call.is_resumable:
        raise InvalidArgumentError(
            LAST_EVENT_ID_HEADER,
            "is set; the body must ask for a stream of one prompt, without prompt_logprobs, like"
            " the body of the broken stream",
        )
    return call

"""The routes that vLLM serves in addition to the OpenAI API."""

from importlib.metadata import version

from aiohttp import web

from router.http.body import BodyReader
from router.http.endpoint import CallId, endpoint, json_response
from router.http.lora import LoadAdapterBody, UnloadAdapterBody, load_adapter, unload_adapter
from router.http.requests.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from router.operators.adapters_and_models import Operations
from router.request.cells import Cells


def vllm_routes(cells: Cells, operations: Operations, bodies: BodyReader) -> list[web.RouteDef]:
    """Return the routes."""

    async def create_tokens(request: web.Request, _: CallId) -> web.Response:
        """Convert a text or a chat to token ids, as vLLM does."""
        body = await bodies.read(request, TokenizeBody)
        return json_response(await tokenize(await cells.known(body.model), body))

    async def create_text(request: web.Request, _: CallId) -> web.Response:
        """Convert token ids to text, with special tokens, as vLLM does."""
        body = await bodies.read(request, DetokenizeBody)
        return json_response(await detokenize(await cells.known(body.model), body))

    async def load_lora_adapter(request: web.Request, _: CallId) -> web.Response:
        """Load a LoRA adapter from a directory on the workers' machines, as vLLM does.

        For operators.
        """
        body = await bodies.read(request, LoadAdapterBody)
        return web.Response(text=await load_adapter(operations, body, request.remote))

    async def unload_lora_adapter(request: web.Request, _: CallId) -> web.Response:
        """Unload an adapter once its requests have ended, as vLLM does; for operators."""
        body = await bodies.read(request, UnloadAdapterBody)
        return web.Response(text=await unload_adapter(operations, body, request.remote))

    async def get_version(_: web.Request, __: CallId) -> web.Response:
        """Return the service's version."""
        return json_response({"version": version("quire")})

    async def get_load(request: web.Request, __: CallId) -> web.Response:
        """Return the number of live sequences (`server_load`), and what `GetLoad` returns.

        `?model=` selects one model.
        """
        load = await cells.load(request.query.get("model", ""))
        num_live = load.num_requests_running + load.num_requests_waiting + load.num_requests_swapped
        fields = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
        return json_response({"server_load": num_live, **fields})

    return [
        web.post("/v1/load_lora_adapter", endpoint(load_lora_adapter)),
        web.post("/v1/unload_lora_adapter", endpoint(unload_lora_adapter)),
        web.post("/tokenize", endpoint(create_tokens)),
        web.post("/detokenize", endpoint(create_text)),
        web.get("/version", endpoint(get_version)),
        web.get("/load", endpoint(get_load)),
    ]

"""Generates the page of HTTP routes, of every process and of the router."""

import ast
import inspect
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web

import rpc.health
from router.http.anthropic.body import CountBody, MessagesBody
from router.http.api import routes as openai_routes
from router.http.batches.routes import BatchBody
from router.http.embeddings import EmbeddingsBody, RerankBody, ScoreBody
from router.http.lora import LoadAdapterBody, UnloadAdapterBody
from router.http.openai_responses.body import ResponseBody
from router.http.requests.chat import ChatBody
from router.http.requests.completions import CompletionBody
from router.http.requests.shared_fields import NO_EFFECT
from router.http.requests.tokens import DetokenizeBody, TokenizeBody
from router.http.strict_json import Schema
from router.operators.usage import UsageReports
from router.ui.api import Ui

_HEAD = """# HTTP

The router serves OpenAI's API, and Anthropic's `/v1/messages`, with their fields, errors and
streams; an unknown field is refused by name. `/ui` is a page for people
([screens.md](../screens.md)); the routes below `/ui/api` are for that page, and change with it.
Every process answers the probes.

| | |
|---|---|
"""

_FIELDS = """
## Fields

An accepted field is honoured, whether it is OpenAI's or vLLM's. These fields are accepted, although
they have no effect: {no_effect}. They label records, which Quire does not keep (`store: true` is
refused).

`tools` needs a model whose chat template has a place for them. With `tool_choice` "auto", calls in
the model's syntax become `message.tool_calls`; if the syntax is not known, "auto" is refused by
name, and so is a function with `strict: true` where [the syntax does not allow
it](../clients.md#tools-and-thinking). With "required", or a function's name, the output is forced
to be calls whose arguments follow the function's JSON schema, for any model. `finish_reason` is
"tool_calls" after calls, unless the output was cut at `max_tokens`.

`stream_options` takes `include_usage`, and with it vLLM's `continuous_usage_stats`: each event has
the tokens so far.

An error's `type`, `param` and `message` describe the problem; its `code` is a word (`not_found`,
`rate_limit_exceeded` …) or null.

| path | fields |
|---|---|
{taken}

These fields are refused by name, except with their neutral value:

| path | fields |
|---|---|
{refused}
"""

_BODIES: dict[str, type[Schema]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/batches": BatchBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/v1/embeddings": EmbeddingsBody,
    "/rerank": RerankBody,
    "/score": ScoreBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}


def page() -> str:
    """Return the page, in Markdown."""
    rows = [f"| `GET {path}` | {text} |" for path, text in probe_paths().items()]
    rows += [f"| `{method} {path}` | {text} |" for method, path, text in router_routes()]
    return _HEAD + "\n".join(rows) + "\n" + _fields()


def _fields() -> str:
    taken, refused = [], []
    for path, body in _BODIES.items():
        names = sorted(field.alias or name for name, field in body.model_fields.items())
        taken.append(f"| `{path}` | {_codes(names)} |")
        if body.unimplemented:
            refused.append(
                f"| `{path}` | {_codes(sorted(map(_neutral, body.unimplemented.items())))} |"
            )
    return _FIELDS.format(
        no_effect=_codes(sorted(NO_EFFECT)), taken="\n".join(taken), refused="\n".join(refused)
    )


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _neutral(field: tuple[str, tuple[object, ...]]) -> str:
    name, values = field
    return f"{name}: {' or '.join(map(json.dumps, values))}" if values else name


def probe_paths() -> dict[str, str]:
    """Return the probes' paths, each with its description."""
    told = {
        "/health": "200 while nothing is wrong with the process, else 503 and what",
        "/ready": "200 if it takes requests, else 503, what it is doing and how far it is",
        "/metrics": "its metrics, for Prometheus",
    }
    tree = ast.parse(inspect.getsource(rpc.health))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    paths = {s for s in strings if isinstance(s, str) and s.startswith("/") and s.count("/") == 1}
    if paths != set(told):
        raise ValueError(f"the probes are {sorted(paths)}; told of are {sorted(told)}")
    return told


def router_routes() -> list[tuple[str, str, str]]:
    """Return method, path and the first line of the handler's docstring."""
    app = web.Application()
    batches = cast(Any, SimpleNamespace(store=None))
    some = cast(Any, None)
    usage = UsageReports(None, some)
    app.add_routes(openai_routes(some, some, max_body_bytes=0, batches=batches, usage=usage))
    app.add_routes(Ui(cast(Any, None)).routes())
    found = []
    for route in app.router.routes():
        resource = route.resource
        if route.method in ("*", "HEAD") or resource is None:
            continue
        handler = cast(Callable[..., object], route.handler)
        found.append((route.method, resource.canonical, _first_line(handler)))
    return found


def _first_line(handler: Callable[..., object]) -> str:
    doc = inspect.getdoc(inspect.unwrap(handler))
    if not doc:
        raise ValueError(f"{handler} does not say what it does")
    return doc.split("\n", 1)[0].rstrip(".")

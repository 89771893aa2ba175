"""The HTTP routes: those of every process, and the router's."""

import ast
import inspect
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

import rpc.probes
from router.openai.face import routes as openai_routes

_HEAD = """# HTTP

The router speaks OpenAI's API; fields, errors and streams are as there, and an unknown field is
refused by name. Every process answers the probes.

| | |
|---|---|
"""


def page() -> str:
    """Return the page, in Markdown."""
    rows = [f"| `GET {path}` | {text} |" for path, text in probe_paths().items()]
    rows += [f"| `{method} {path}` | {text} |" for method, path, text in router_routes()]
    return _HEAD + "\n".join(rows) + "\n"


def probe_paths() -> dict[str, str]:
    """Return the probes' paths, and what each says."""
    told = {
        "/health": "200 while nothing is wrong with the process, else 503 and what",
        "/ready": "200 if it takes requests, else 503, what it is doing and how far it is",
        "/metrics": "its metrics, for Prometheus",
    }
    tree = ast.parse(inspect.getsource(rpc.probes))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    paths = {s for s in strings if isinstance(s, str) and s.startswith("/") and s.count("/") == 1}
    if paths != set(told):
        raise ValueError(f"the probes are {sorted(paths)}; told of are {sorted(told)}")
    return told


def router_routes() -> list[tuple[str, str, str]]:
    """Return method, path and the first line of what the handler says of itself."""
    app = web.Application()
    app.add_routes(openai_routes(cast(Any, None)))
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

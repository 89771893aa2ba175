"""`quire batch`: answers a file of requests in the format of OpenAI's batches."""

import asyncio
import contextlib
import json
import secrets
import ssl
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import aiohttp

from contract.request import MAX_PRIORITY
from quire.cli.command_error import CommandError
from quire.cli.settings import BatchSettings
from quire.cli.target import find_service
from quire.cli.up.ports import prefer
from quire.private_service import PrivateService, ServiceStartError
from rpc.settings import parse_settings

URLS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
)
_HOST: Final = "127.0.0.1"
_RETRIED: Final = frozenset({429, 502, 503, 529})
_OK: Final = 200
_MAX_WAIT_S: Final = 30.0
_PATIENCE_S: Final = 300.0
"""How long the service may be unreachable before a request fails. All processes of the service can
restart in this time."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(BatchSettings, "quire batch", argv)
    lines = list(read_lines(settings.file))
    done = answered(settings.output)
    wanted = [line for line in lines if line.custom_id not in done]
    with _service(settings) as (url, api_key):
        num_failed = asyncio.run(_answer_all(settings, url, api_key, wanted))
    failed = f", {num_failed} failed" if num_failed else ""
    print(f"{len(wanted) - num_failed} of {len(wanted)} answered{failed}: {settings.output}")
    return 1 if num_failed else 0


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file of requests; raises CommandError that names an invalid line."""
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    line = _parse(f"{path}:{number}", text)
                    if line.custom_id in seen:
                        raise CommandError(
                            f"{path}:{number}: custom_id {line.custom_id!r} is on an earlier line"
                        )
                    seen.add(line.custom_id)
                    yield line
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from None


def _parse(place: str, text: str) -> Line:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{place}: is not JSON: {error}") from None
    match value:
        case {"custom_id": str(custom_id), "url": str(url), "body": dict(body)}:
            pass
        case _:
            raise CommandError(f"{place}: must be an object with custom_id, url and body")
    if value.get("method", "POST") != "POST":
        raise CommandError(f"{place}: method is {value['method']!r}; it must be POST")
    if url not in URLS:
        raise CommandError(f"{place}: url is {url!r}; it must be one of {', '.join(URLS)}")
    if body.get("stream"):
        raise CommandError(f"{place}: body.stream is set; an answer in a file is not streamed")
    return Line(custom_id, url, body)


def answered(path: Path) -> set[str]:
    """Remove failed answers from an output file; return the `custom_id`s of the other answers."""
    if not path.exists():
        return set()
    done: dict[str, bytes] = {}
    try:
        with path.open("rb") as file:
            for text in file:
                if not text.endswith(b"\n"):
                    break  # the earlier run was killed while it wrote this line
                value = json.loads(text)
                if value["response"] is not None and value["response"]["status_code"] == _OK:
                    done[value["custom_id"]] = text
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(b"".join(done.values()))
        new.replace(path)
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path}: is not a file of answers: {error!r}") from None
    except OSError as error:
        raise CommandError(f"{path}: {error}") from None
    return set(done)


@contextlib.contextmanager
def _service(settings: BatchSettings) -> Iterator[tuple[str, str]]:
    """Find a service, or start one; yield the service's URL and API key."""
    if settings.url:
        yield settings.url.rstrip("/").removesuffix("/v1"), settings.api_key.get_secret_value()
        return
    if not settings.model:
        address = find_service(settings.http_port).http_address
        scheme = "http" if settings.client_tls is None else "https"
        yield f"{scheme}://{address}", settings.api_key.get_secret_value()
        return
    port, key = prefer(_HOST, 0, ()), secrets.token_hex()
    flags = {"model": settings.model, "host": _HOST, "http_port": port}
    try:
        service = PrivateService(flags, key)
    except ServiceStartError as error:
        raise CommandError(str(error)) from None
    with service:
        yield f"http://{_HOST}:{port}", key


async def _answer_all(
    settings: BatchSettings, url: str, api_key: str, lines: Sequence[Line]
) -> int:
    """Answer all lines, several at a time; return how many have failed."""
    headers = {"X-Quire-Priority": str(-MAX_PRIORITY)}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    tls = settings.client_tls
    context = None if tls is None else ssl.create_default_context(cafile=settings.tls_ca)
    num_failed = 0
    waiting = iter(lines)
    async with _session(url, headers, context) as session:
        with settings.output.open("a", encoding="utf-8") as output:

            async def answer_next() -> None:
                nonlocal num_failed
                for line in waiting:  # each task takes the next line
                    num_failed += not await _answer(session, line, output)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(settings.concurrency, len(lines))):
                    tasks.create_task(answer_next())
    return num_failed


@contextlib.asynccontextmanager
async def _session(
    url: str, headers: dict[str, str], context: ssl.SSLContext | None
) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, ssl=True if context is None else context)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(
        url, headers=headers, connector=connector, timeout=timeout
    ) as session:
        yield session


async def _answer(session: aiohttp.ClientSession, line: Line, output: TextIO) -> bool:
    """Send a request until it is answered; write the answer to `output`.

    If the service is unreachable for `_PATIENCE_S`, write an error instead of an answer. Return
    whether the answer has the status OK.
    """
    response, error = None, None
    wait_s, lost_at = 0.5, None
    # With a key, a stored response is not computed again after the connection has broken.
    headers = {"Idempotency-Key": secrets.token_hex(16)}
    while True:
        try:
            async with session.post(line.url, json=line.body, headers=headers) as answer:
                if answer.status not in _RETRIED:
                    response = {
                        "status_code": answer.status,
                        "request_id": answer.headers.get("X-Request-Id", ""),
                        "body": await answer.json(content_type=None),
                    }
                    break
                wait_s, lost_at = float(answer.headers.get("Retry-After", wait_s)), None
        except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
            now = asyncio.get_running_loop().time()
            lost_at = lost_at or now  # counts from the loss: answers may take over `_PATIENCE_S`
            if now - lost_at > _PATIENCE_S:
                error = {"code": "unreachable", "message": repr(failure)}
                break
        await asyncio.sleep(min(wait_s, _MAX_WAIT_S))
        wait_s = min(2 * wait_s, _MAX_WAIT_S)
    told = {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    output.write(json.dumps(told, ensure_ascii=False) + "\n")
    output.flush()
    is_ok = response is not None and response["status_code"] == _OK
    if not is_ok:
        sys.stderr.write(f"{line.custom_id}: {(response or {}).get('body') or error}\n")
    return is_ok

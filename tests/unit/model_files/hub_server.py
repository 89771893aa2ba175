"""A Hugging Face hub on the loopback: the calls that `huggingface_hub` makes to download."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "a" * 40


class HubServer:
    """Repositories with their files' contents, by revision."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.token = ""
        """Needed for all calls, if not empty."""
        self.downloaded: list[str] = []
        """Names of files, in order."""
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        parts = unquote(urlparse(path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repository, kind = "/".join(parts[2:4]), parts[4]
            files = self.repositories.get(repository)
            if files is None:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            if parts[5] not in ("main", "v1", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            if kind == "revision":
                return 200, {}, json.dumps({"id": repository, "sha": COMMIT}).encode()
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        repository, name = "/".join(parts[:2]), "/".join(parts[4:])
        content = self.repositories.get(repository, {}).get(name)
        if content is None:  # its package asks for more than models
            return 404, {}, b"{}"
        return 200, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}, content


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(hub: HubServer) -> Iterator[HubServer]:
    """Serve it; `hub.url` says where."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            if hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
                status, headers, body = 401, {"X-Error-Code": "GatedRepo"}, b"{}"
            else:
                status, headers, body = hub.answer(self.path)
            if with_body and status == 200 and "/resolve/" in self.path:
                hub.downloaded.append(self.path.rpartition("/")[2])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

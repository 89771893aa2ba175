"""A fake service process: answers /ready as FAKE_* variables say, and ends at SIGTERM."""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def run(name: str) -> None:
    folder = Path(os.environ["FAKE_DIR"])
    record = {"argv": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}
    unfinished = folder / f"{name}.{os.getpid()}"  # there may be several workers
    unfinished.write_text(json.dumps(record))
    unfinished.replace(folder / f"{name}.json")
    if os.environ.get("FAKE_FAILS") == name:
        sys.exit("fake: there is no such thing as weights")
    if os.environ.get("FAKE_IGNORES_SIGTERM") == name:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            not_ready = (folder / f"{name}.not-ready").exists()
            body = {"status": "loading", "progress": 0.5} if not_ready else {"status": "ready"}
            self.send_response(503 if not_ready else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    port = int(sys.argv[sys.argv.index("--http-port") + 1])
    sys.stderr.write(f"fake {name} listens\n")
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

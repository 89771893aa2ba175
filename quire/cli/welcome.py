"""What the user sees when a service is ready: its addresses, commands to try, a demonstration."""

import subprocess
import sys
from typing import Final

from quire.cli.invocation import invocation

DEMO_PROMPT: Final = 'class Stack:\n    """A last-in, first-out container."""\n'
_DEMO_FLAGS: Final = ("--max-tokens", "100", "--temperature", "0.6", "--seed", "1")


def how_to_use(http_address: str, grpc_target: str, model_name: str) -> str:
    """Tell where the service is and what to try first."""
    port = http_address.rpartition(":")[2]
    quire = invocation()
    target = "" if grpc_target == "127.0.0.1:50051" else f" --target {grpc_target}"
    body = f'{{"model": "{model_name}", "prompt": "def add(", "max_tokens": 64, "stream": true}}'
    return f"""\
  HTTP (OpenAI)   http://{http_address}/v1
  gRPC            {grpc_target}
  stop it         {quire} down --http-port {port}
Try:
  {quire} generate 'def add('{target}
  curl -N http://{http_address}/v1/completions -H 'content-type: application/json' -d '{body}'"""


def start_demo(grpc_target: str) -> subprocess.Popen[bytes]:
    """Stream a completion to the terminal.

    In a process of its own, since gRPC's threads and a supervisor's forks do not mix.
    """
    print(f"\n{DEMO_PROMPT}", end="", flush=True)
    command = [sys.executable, "-m", "quire.cli", "generate", DEMO_PROMPT, *_DEMO_FLAGS]
    return subprocess.Popen([*command, "--target", grpc_target])  # noqa: S603 - ourselves

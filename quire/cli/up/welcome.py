"""What the user sees when a service is ready: its addresses, commands to try, a demonstration."""

import os
import subprocess
import sys
from typing import Final

from quire.cli.invocation import invocation
from quire.cli.up.settings import UpSettings
from rpc.settings import ENV_PREFIX

DEMO_PROMPT: Final = 'class Stack:\n    """A last-in, first-out container."""\n'
_DEMO_FLAGS: Final = ("--max-tokens", "100", "--temperature", "0.6", "--seed", "1")


def how_to_use(http_address: str, grpc_target: str, model_name: str, *, tls: bool = False) -> str:
    """Tell where the service is and what to try first."""
    url = f"{'https' if tls else 'http'}://{http_address}/v1"
    port = http_address.rpartition(":")[2]
    quire = invocation()
    target = "" if grpc_target == "127.0.0.1:50051" else f" --target {grpc_target}"
    body = f'{{"model": "{model_name}", "prompt": "def add(", "max_tokens": 64, "stream": true}}'
    return f"""\
  HTTP (OpenAI)   {url}
  gRPC            {grpc_target}
  stop it         {quire} down --http-port {port}
Try:
  {quire} generate 'def add('{target}
  curl -N {url}/completions -H 'content-type: application/json' -d '{body}'"""


def start_demo(grpc_target: str, settings: UpSettings) -> subprocess.Popen[bytes]:
    """Stream a completion to the terminal.

    In a process of its own, since gRPC's threads and a supervisor's forks do not mix.
    """
    names = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
    link = [
        f"--{name.replace('_', '-')}={value}"
        for name in names
        if (value := getattr(settings, name))
    ]
    environment = dict(os.environ)
    if settings.api_key:
        environment[f"{ENV_PREFIX}API_KEY"] = settings.api_key[0].get_secret_value()

    print(f"\n{DEMO_PROMPT}", end="", flush=True)
    command = [sys.executable, "-m", "quire.cli", "generate", DEMO_PROMPT, *_DEMO_FLAGS]
    return subprocess.Popen(  # noqa: S603 - ourselves
        [*command, "--target", grpc_target, *link], env=environment
    )

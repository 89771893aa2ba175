"""What the user sees when a service is ready: its addresses, commands to try, a demonstration."""

import asyncio
import os
import sys
from typing import Final

from quire.cli.invocation import invocation
from quire.cli.up.service_dir import ServiceInfo
from quire.cli.up.settings import UpSettings
from rpc.settings import ENV_PREFIX

DEMO_PROMPT: Final = 'class Stack:\n    """A last-in, first-out container."""\n'
_DEMO_FLAGS: Final = ("--max-tokens", "100", "--temperature", "0.6", "--seed", "1")


def how_to_use(service: ServiceInfo) -> str:
    """Say where the service is and what to try first."""
    url = f"{'https' if service.has_tls else 'http'}://{service.http_address}/v1"
    port = service.http_address.rpartition(":")[2]
    quire = invocation()
    is_default = service.grpc_target == "127.0.0.1:50051"
    target = "" if is_default else f" --target {service.grpc_target}"
    body = (
        f'{{"model": "{service.model_name}", "prompt": "def add(", "max_tokens": 64,'
        ' "stream": true}'
    )
    return f"""\
  HTTP (OpenAI)   {url}
  gRPC            {service.grpc_target}
  stop it         {quire} down --http-port {port}
Try:
  {quire} generate 'def add('{target}
  curl -N {url}/completions -H 'content-type: application/json' -d '{body}'"""


async def run_demo(service: ServiceInfo, settings: UpSettings) -> int:
    """Stream a completion to the terminal; return the exit code.

    In a process of its own: this one must not load gRPC, whose threads do not survive a fork.
    """
    tls = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
    values = {name: value for name in tls if (value := getattr(settings, name))}
    environment = dict(os.environ)
    if settings.api_key:
        environment[f"{ENV_PREFIX}API_KEY"] = settings.api_key[0].get_secret_value()
    print(f"\n{DEMO_PROMPT}", end="", flush=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", "generate", DEMO_PROMPT, *_DEMO_FLAGS),
        *("--target", service.grpc_target),
        *(f"--{name.replace('_', '-')}={value}" for name, value in values.items()),
        env=environment,
    )
    return await process.wait()

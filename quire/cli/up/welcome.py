"""The output when a service is ready: addresses, commands to try, a demonstration."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from quire.cli.invocation import invocation
from quire.cli.up.demo_model import FILE
from quire.cli.up.service_dir import ServiceInfo
from quire.cli.up.settings import UpSettings
from rpc.settings import ENV_PREFIX

_CODE: Final = 'class Stack:\n    """A last-in, first-out container."""\n'
_CODE_FLAGS: Final = ("--max-tokens", "100", "--temperature", "0.6", "--seed", "1")
_QUESTION: Final = "What is the capital of France?"


def how_to_use(service: ServiceInfo) -> str:
    """Return a text with the service's addresses, and with commands to try first."""
    url = f"{'https' if service.has_tls else 'http'}://{service.http_address}/v1"
    port = service.http_address.rpartition(":")[2]
    quire = invocation()
    is_default = service.grpc_target == "127.0.0.1:50051"
    target = "" if is_default else f" --target {service.grpc_target}"
    if chats(service):
        first, path = "chat --temperature 0", "chat/completions"
        asked = f'"temperature": 0, "messages": [{{"role": "user", "content": "{_QUESTION}"}}]'
    else:
        first, path = "generate 'def add('", "completions"
        asked = '"prompt": "def add(", "max_tokens": 64'
    body = f'{{"model": "{service.model_name}", {asked}, "stream": true}}'
    return f"""\
  HTTP (OpenAI)   {url}
  gRPC            {service.grpc_target}
  stop it         {quire} down --http-port {port}
Try:
  {quire} {first}{target}
  curl -N {url}/{path} -H 'content-type: application/json' -d '{body}'"""


def chats(service: ServiceInfo) -> bool:
    """Whether the service's model is the demo model, which is made for chats."""
    return Path(service.model).name == FILE.name


async def run_demo(service: ServiceInfo, settings: UpSettings) -> int:
    """Show on the terminal that the model generates text; return the exit code.

    The demo model answers a question; any other model continues a piece of code. The supervisor,
    which runs this function, must not import gRPC, because the supervisor forks, and gRPC's threads
    do not survive a fork. So a separate process streams the text.
    """
    tls = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
    values = {name: value for name in tls if (value := getattr(settings, name))}
    environment = dict(os.environ)
    if settings.api_key:
        environment[f"{ENV_PREFIX}API_KEY"] = settings.api_key[0].get_secret_value()
    command: tuple[str, ...] = ("generate", _CODE, *_CODE_FLAGS)
    said = b""
    if chats(service):
        command, said = ("chat", "--temperature", "0"), f"{_QUESTION}\n".encode()
    print(f"\n> {_QUESTION}" if said else f"\n{_CODE}", end="\n" * bool(said), flush=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "quire.cli", *command),
        *("--target", service.grpc_target),
        *(f"--{name.replace('_', '-')}={value}" for name, value in values.items()),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
    )
    await process.communicate(said)
    assert process.returncode is not None, "it has ended"
    return process.returncode

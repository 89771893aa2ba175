"""The `quire` command: finds and runs a subcommand, and prints any error in one line."""

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

GROUPS: Final = {
    "processes": {
        "up": "start a service on this machine and keep it running",
        "down": "stop a service",
        "drain": "drain and end one process",
        "restart": "restart the processes of a service, one after another",
        "probe": "check whether one process is ready",
    },
    "observe": {
        "status": "show the processes, health and load of a service",
        "top": "watch queues, sequences, KV and rates",
        "logs": "show the logs of the processes, or those about one request",
        "bench": "measure a service, and show where its time goes",
        "usage": "show what requests have used, by tenant, key, model and time",
        "replay": "replay a scheduler's recording, and explain its preemptions",
    },
    "live": {
        "requests": "list live requests",
        "cancel": "end live requests, by id, tenant or age",
        "migrate": "move a live request with its KV to another worker",
        "kv": "show which sequences hold which KV blocks",
        "resize": "resize a worker's KV pool",
        "defragment": "move the held KV blocks of each worker together",
    },
    "models": {
        "load": "load a worker's model again, or another one",
        "unload": "unload a worker's model, to free its device",
        "quantize": "write a model as 4- or 8-bit integers, fitted to a text",
        "lora": "list, load and unload LoRA adapters",
    },
    "inference": {
        "generate": "continue a prompt, streaming",
        "chat": "chat with the model, streaming",
        "embed": "turn texts into vectors",
        "batch": "answer a file of requests",
    },
}
"""Maps each folder of `quire/cli/commands` to the folder's commands, and each command to its line
in the help."""

COMMANDS: Final = {
    name: f"quire.cli.commands.{group}.{name}" for group, names in GROUPS.items() for name in names
}
"""Maps each command to its module."""

_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case [] | ["-h" | "--help" | "help", *_]:
            print(_help())
            return 0 if arguments else 2
        case ["--version", *_]:
            print(f"quire {version('quire')}")
            return 0
        case [name, *_] if name not in COMMANDS:
            sys.stderr.write(
                f"quire: {name}: no such command; it must be one of {', '.join(COMMANDS)}\n"
            )
            return 2
    # Import only the command's module, so that the command starts fast.
    command = importlib.import_module(COMMANDS[arguments[0]])
    try:
        code: int = command.main(arguments[1:])
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of standard output is gone
        sys.stderr.close()
        return 1
    except _known_errors() as error:
        sys.stderr.write(f"quire: {error}\n")
        return 1
    return code


def _known_errors() -> tuple[type[Exception], ...]:
    from contract.errors import QuireError  # noqa: PLC0415
    from quire.cli.command_error import CommandError  # noqa: PLC0415 - after the command's imports

    return CommandError, QuireError


def _help() -> str:
    commands = "\n\n".join(
        "\n".join(f"  {name:<12}{what}" for name, what in group.items())
        for group in GROUPS.values()
    )
    return (
        "Serves large language models from a paged KV cache.\n\n"
        f"usage: quire COMMAND [FLAGS]\n\n{commands}\n\n"
        "`quire COMMAND --help` lists the flags of a command; each is also an environment variable."
    )


if __name__ == "__main__":
    raise SystemExit(main())

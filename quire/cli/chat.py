"""`quire chat`: a conversation in the terminal."""

import sys
from collections.abc import Sequence

from quire.cli.generate import sampling_from
from quire.cli.settings import ChatSettings
from quire.cli.streaming import show_one
from quire.client import Client
from quire.types import ChatMessage
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    """Run `quire chat`; give the exit code."""
    settings = parse_settings(ChatSettings, "quire chat", argv)  # type: ignore[type-var]
    beginning = [ChatMessage("system", settings.system)] if settings.system else []
    messages = list(beginning)
    with Client(settings.target) as client:
        if sys.stdin.isatty():
            import readline  # noqa: F401, PLC0415 - importing it gives input() its line editing

            print("/new forgets the conversation, /quit or Ctrl-D ends.")
        while True:
            try:
                said = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            match said:
                case "":
                    pass
                case "/quit":
                    return 0
                case "/new":
                    messages = list(beginning)
                case _:
                    messages.append(ChatMessage("user", said))
                    messages.append(ChatMessage("assistant", _answer(client, settings, messages)))


def _answer(client: Client, settings: ChatSettings, messages: Sequence[ChatMessage]) -> str:
    """Stream the assistant's answer; Ctrl-C ends it early."""
    prompt_token_ids = client.tokenize(
        messages, model=settings.served_model_name, timeout_s=settings.timeout_s
    )
    events = client.generate(
        prompt_token_ids,
        sampling_from(settings),
        timeout_s=settings.timeout_s,
        model=settings.served_model_name,
    )
    text = show_one(events)
    print()
    return text

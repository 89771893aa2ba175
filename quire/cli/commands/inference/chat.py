"""`quire chat`: a conversation in the terminal."""

import sys
from collections.abc import Sequence

from contract.errors import QuireError
from quire.cli.command_error import CommandError
from quire.cli.commands.inference.generate import sampling_from
from quire.cli.settings import ChatSettings
from quire.cli.streaming import show_one
from quire.cli.target import connection_errors, find_target, open_client
from quire.client import Client
from quire.client.types import ChatMessage
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(ChatSettings, "quire chat", argv)
    beginning = [ChatMessage("system", settings.system)] if settings.system else []
    messages = list(beginning)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401, PLC0415 - this import gives input() line editing

        print("/new starts a new conversation, Ctrl-C stops an answer, /quit or Ctrl-D ends.")
    target = find_target(settings)
    with open_client(target, settings) as client:
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except EOFError:
                return 0
            match line:
                case "":
                    continue
                case "/quit":
                    return 0
                case "/new":
                    messages = list(beginning)
                    continue
            asked = [*messages, ChatMessage("user", line)]
            try:
                with connection_errors(target):
                    answer = _answer(client, settings, asked)
            except (KeyboardInterrupt, QuireError, CommandError) as error:
                if not is_terminal:
                    raise
                # Continue as if this message had not been sent.
                print(f"\nquire: {error}" if str(error) else "")
            else:
                messages = [*asked, ChatMessage("assistant", answer)]


def _answer(client: Client, settings: ChatSettings, messages: Sequence[ChatMessage]) -> str:
    """Stream the assistant's answer; return its text."""
    prompt_token_ids = client.tokenize(
        messages, model=settings.served_model_name, timeout_s=settings.timeout_s
    )
    events = client.generate(
        prompt_token_ids,
        sampling_from(settings),
        timeout_s=settings.timeout_s,
        model=settings.served_model_name,
        resumable=True,
    )
    text = show_one(events)
    print()
    return text

"""Prints the outputs of a request as they arrive."""

import sys
from collections.abc import Iterable

from quire.cli.command_error import CommandError
from quire.client.types import Event, FinishReason, OutputDelta, OutputFinished


def show_one(events: Iterable[Event]) -> str:
    """Print the text of the only output as it arrives, and return it.

    Raises CommandError if the output failed.
    """
    text: list[str] = []
    for event in events:
        match event:
            case OutputDelta():
                text.append(event.text)
                sys.stdout.write(event.text)
                sys.stdout.flush()
            case OutputFinished():
                _raise_failure(event)
    return "".join(text)


def show_each(events: Iterable[Event], num_outputs: int) -> None:
    """Print several outputs, each one when it is complete."""
    texts: list[list[str]] = [[] for _ in range(num_outputs)]
    for event in events:
        match event:
            case OutputDelta():
                texts[event.output_index].append(event.text)
            case OutputFinished():
                _raise_failure(event)
                print(f"--- {event.output_index}: {event.finish_reason.value}")
                print("".join(texts[event.output_index]), flush=True)


def _raise_failure(finished: OutputFinished) -> None:
    if finished.error is not None:
        retry = " (a retry may help)" if finished.error.retryable else ""
        raise CommandError(f"the output ended early: {finished.error.message}{retry}")
    if finished.finish_reason is FinishReason.DEADLINE:
        raise CommandError("the output ended early: --timeout-s has passed")
    if finished.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
        raise CommandError(f"the output ended early: {finished.finish_reason.value}")

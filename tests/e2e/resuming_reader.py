"""The Python client, reading a resumable stream in a thread, for tests that break it."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from quire.client import Client, OutputDelta, Usage

NUM_BEFORE = 20
"""Tokens that a stream has when something breaks."""


class ResumingReader:
    """Reads a stream in a thread, and signals when it has `NUM_BEFORE` tokens."""

    def __init__(self, targets: list[str], prompt, sampling, options) -> None:
        self.is_under_way = threading.Event()
        if "beam" in options:  # all output comes at the end
            self.is_under_way.set()
        self.num_tokens = 0
        self._pool = ThreadPoolExecutor(1)
        self._args = targets, prompt, sampling, options
        self.events: Future[list[Any]] = self._pool.submit(self._read)

    def _read(self) -> list[Any]:
        targets, prompt, sampling, options = self._args
        events = []
        with Client(targets) as client:
            for event in client.generate(
                prompt, sampling, timeout_s=200, resumable=True, **options
            ):
                events.append(event)
                if isinstance(event, OutputDelta):
                    self.num_tokens += len(event.token_ids)
                    if self.num_tokens >= NUM_BEFORE:
                        self.is_under_way.set()
        self._pool.shutdown(wait=False)
        return events


def merged(events: list[Any]) -> list[Any]:
    """The events without their cut into deltas; fails on a gap or repeat."""
    outputs: dict[int, list[Any]] = {}
    others = []
    for event in events:
        if isinstance(event, OutputDelta):
            token_ids, texts, logprobs = outputs.setdefault(event.output_index, [[], [], []])
            assert event.token_offset == len(token_ids), "a gap or a repeat"
            token_ids.extend(event.token_ids)
            texts.append(event.text)
            logprobs.extend(event.logprobs)
        # the cached tokens differ between a first and a second request
        elif isinstance(event, Usage):
            others.append((event.prompt_tokens, event.completion_tokens))
        else:
            others.append(event)
    return [
        [
            (index, ids, "".join(texts), logs)
            for index, (ids, texts, logs) in sorted(outputs.items())
        ],
        sorted(map(str, others)),
    ]

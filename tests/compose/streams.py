"""Streams over gRPC, read in threads while a test disturbs the deployment."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from quire.client import Client, OutputDelta, SamplingParams

NUM_TOKENS = 900
"""Nearly the shipped model's whole context."""
PROMPTS = tuple(f"def function_{i}(x):" for i in range(24))
"""Many at once, so that they last until the slow engine has executed a command."""

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
_NUM_BEFORE = 10
_DEADLINE_S = 240.0


class Streams:
    """One stream for each of PROMPTS."""

    def __init__(self, target: str) -> None:
        self._client = Client(target)
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._under_way = [threading.Event() for _ in PROMPTS]
        self._texts: list[Future[str]] = [
            self._threads.submit(self._read, prompt, under_way)
            for prompt, under_way in zip(PROMPTS, self._under_way, strict=True)
        ]

    def _read(self, prompt: str, under_way: threading.Event) -> str:
        texts: list[str] = []
        num_tokens = 0
        for event in self._client.generate(prompt, _SAMPLING, timeout_s=_DEADLINE_S):
            if isinstance(event, OutputDelta):
                texts.append(event.text)
                num_tokens += len(event.token_ids)
            if num_tokens >= _NUM_BEFORE:
                under_way.set()
        assert num_tokens == NUM_TOKENS
        return "".join(texts)

    def wait_until_under_way(self) -> None:
        for under_way in self._under_way:
            assert under_way.wait(60)

    @property
    def num_live(self) -> int:
        return sum(not text.done() for text in self._texts)

    def texts(self) -> Sequence[str]:
        """The texts of all streams, when they are complete; raises a stream's error."""
        wait(self._texts, timeout=_DEADLINE_S)
        return [text.result(timeout=0) for text in self._texts]

    def close(self) -> None:
        self._client.close()
        self._threads.shutdown()


@contextlib.contextmanager
def open_streams(target: str) -> Iterator[Streams]:
    """Streams that all have some tokens."""
    streams = Streams(target)
    try:
        streams.wait_until_under_way()
        yield streams
    finally:
        streams.close()

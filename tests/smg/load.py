"""Streams through a gateway that must lose nothing while processes behind it are killed."""

import concurrent.futures
import itertools
import threading

import openai

from tests.e2e.child import eventually
from tests.smg.gateway import MODEL

NAME = MODEL.name
NUM_STREAMS = 6
PROMPTS = [f"def {name}(" for name in ("add", "read", "close", "find", "merge", "split", "go")]


def complete(client, prompt, max_tokens=32, **fields):
    return client.completions.create(
        model=NAME, prompt=prompt, max_tokens=max_tokens, temperature=0, **fields
    )


def kill_in_turn(client, cells, num_kills):
    """Kill schedulers and workers of two cells under load, one after another; return the load."""
    kills = [("scheduler", 0), ("worker", 1), ("scheduler", 1), ("worker", 0)]
    load = Load(client)
    with load:
        for kind, index in itertools.islice(itertools.cycle(kills), num_kills):
            load.wait_for(NUM_STREAMS)
            cell = cells[index]
            getattr(cell, kind).kill()
            getattr(cell, f"start_{kind}")()
            cell.wait_until_ready()
    return load


class Load:
    """Streams through a gateway, each compared with its expected text."""

    def __init__(self, client):
        self.client = client
        self.expected = {
            prompt: complete(client, prompt, 200).choices[0].text for prompt in PROMPTS
        }
        self.num_done = 0
        self.lost = []
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_STREAMS)
        self._runs = [self._pool.submit(self._run, i) for i in range(NUM_STREAMS)]
        return self

    def __exit__(self, *_):
        self._stop.set()
        for run in self._runs:
            run.result()
        self._pool.shutdown()

    def _run(self, first):
        prompts = list(self.expected)
        for number in itertools.count(first):
            if self._stop.is_set():
                return
            prompt = prompts[number % len(prompts)]
            try:
                stream = complete(self.client, prompt, 200, stream=True)
                text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
                problem = None if text == self.expected[prompt] else f"{prompt!r} gave {text!r}"
            except openai.OpenAIError as error:
                problem = f"{type(error).__name__}: {error}"
            with self._lock:
                self.num_done += 1
                if problem:
                    self.lost.append(problem)

    def wait_for(self, count):
        target = self.num_done + count
        eventually(lambda: self.num_done >= target or None, f"{count} more streams have ended")

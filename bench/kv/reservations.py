"""The alternative to paging: a request reserves one run of slots for its limit of tokens."""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kv.replay import MAX_BATCHED_TOKENS, Job, Step, share_outside


class FirstFit:
    """Allocates runs of `num_slots` slots: the first free run that is long enough."""

    def __init__(self, num_slots: int) -> None:
        self._free = [(0, num_slots)]
        """(start, length), ascending; no two touch."""

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)

    @property
    def longest_free(self) -> int:
        return max((length for _, length in self._free), default=0)

    def take(self, num_slots: int) -> int | None:
        """Allocate a run and return its start; None if no free run is long enough."""
        for index, (start, length) in enumerate(self._free):
            if length >= num_slots:
                rest = (start + num_slots, length - num_slots)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return start
        return None

    def give_back(self, start: int, num_slots: int) -> None:
        """Free a held run."""
        index = bisect(self._free, (start, 0))
        first, end = index, start + num_slots
        if index and sum(self._free[index - 1]) == start:
            first, start = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            end = sum(self._free[index])
            index += 1
        self._free[first:index] = [(start, end - start)]


@dataclass
class _Reserved:
    index: int
    start: int
    num_computed: int = 0
    num_outputs: int = 0


class ReservingEngine:
    """Continuous batching; a request can start when `FirstFit` has a run of slots for it."""

    def __init__(self, jobs: Iterator[Job], num_clients: int, num_slots: int) -> None:
        self.started: set[int] = set()
        self.no_room: set[int] = set()
        self.no_run: set[int] = set()
        self._source = jobs
        self._jobs = list(islice(jobs, num_clients))
        self._memory = FirstFit(num_slots)
        self._running: list[_Reserved] = []

    def step(self, now: float) -> Step:  # noqa: ARG002 - it needs no clock
        """Decode all requests, then compute prompts, then admit requests, within the budget."""
        num_outputs = 0
        for each in self._running:
            if each.num_outputs:
                each.num_computed += 1
                each.num_outputs += 1
                num_outputs += 1
        num_tokens = num_outputs
        while num_tokens < MAX_BATCHED_TOKENS:
            new = next((each for each in self._running if not each.num_outputs), None)
            if new is None and (new := self._admit()) is None:
                break
            prompt_len = self._jobs[new.index].prompt_len
            chunk = min(MAX_BATCHED_TOKENS - num_tokens, prompt_len - new.num_computed)
            new.num_computed += chunk
            num_tokens += chunk
            if new.num_computed == prompt_len:
                new.num_outputs = 1
                num_outputs += 1
        step = Step(
            num_tokens,
            sum(each.num_computed for each in self._running),
            num_outputs,
            len(self._running),
            share_outside(self._memory.longest_free, self._memory.num_free),
        )
        for each in tuple(self._running):
            job = self._jobs[each.index]
            if each.num_outputs == job.output_len:
                self._running.remove(each)
                self._memory.give_back(each.start, job.max_len)
                self._jobs.append(next(self._source))
        return step

    def _admit(self) -> _Reserved | None:
        index = len(self.started)
        if index == len(self._jobs):
            return None
        need = self._jobs[index].max_len
        if (start := self._memory.take(need)) is None:
            (self.no_run if need <= self._memory.num_free else self.no_room).add(index)
            return None
        self.started.add(index)
        self._running.append(_Reserved(index, start))
        return self._running[-1]

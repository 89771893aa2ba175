"""What paging is compared with: a request's room is reserved, as one run, for its most tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from contiguous import FirstFit
from kv_simulation import MAX_BATCHED_TOKENS, Job, Step, share_outside


@dataclass
class _Reserved:
    index: int
    start: int
    num_computed: int = 0
    num_outputs: int = 0


class ReservingEngine:
    """Continuous batching; a request runs when the first fit has a run for it."""

    def __init__(self, jobs: Iterator[Job], num_clients: int, num_slots: int) -> None:
        self.started: set[int] = set()
        self.no_room: set[int] = set()
        self.no_run: set[int] = set()
        self._source = jobs
        self._jobs = list(islice(jobs, num_clients))
        self._memory = FirstFit(num_slots)
        self._running: list[_Reserved] = []

    def step(self, now: float) -> Step:  # noqa: ARG002 - it needs no clock
        """Decode all, then compute prompts, then admit, within the budget."""
        num_outputs = num_tokens = 0
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

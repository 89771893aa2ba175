"""Which worker a request goes to.

By prefix, the default, it goes where it costs least, in tokens that must be computed::

    cost(worker) =   tokens of its prompt that the worker's prefix cache lacks
                   + tokens of prompts that the worker has to compute before it
                   + SEQUENCE_TOKENS * sequences that the worker has

The first two are what stands between the request and its first token; they are the time that
Mooncake's Conductor estimates (queue + prefill; Qin et al., FAST 2025), in tokens because the
workers are alike. The third is what decoding sequences cost those beside them; without it all that
share a prefix would crowd on one worker as long as its queue is short (the load term of Preble,
Srivatsa et al., ICLR 2025). Where nothing is cached and nothing is queued, it is least loaded.

However it is chosen, a worker whose memory is short comes last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from contract.hashing import BlockHash, extend_chain, root_hash
from scheduler_svc.core.request import Request
from scheduler_svc.workers.request_ends import num_live_seqs

SEQUENCE_TOKENS: Final = 64
"""Prompt tokens that weigh as much as one more sequence: a 2,048-token prefix is worth going where
32 more sequences are. `bench/placement.py --sweep` shows what other values do."""


class Placement(StrEnum):
    """How a worker is chosen."""

    PREFIX = "prefix"
    """Where the least must be computed first; see the module."""
    LEAST_LOADED = "least-loaded"
    """Where the fewest sequences are."""
    ROUND_ROBIN = "round-robin"
    """One after another."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy one worker is, as far as placement cares."""

    num_running: int
    num_waiting: int
    """Sequences that wait, those that its engine has not looked at yet included."""
    max_waiting: int
    max_request_len: int
    """Most tokens of one of its sequences."""
    num_queued_tokens: int = 0
    """Known tokens that it has to compute, likewise."""
    is_memory_short: bool = False
    """Whether it has less run than it could."""

    @property
    def num_seqs(self) -> int:
        """Sequences, waiting or running."""
        return self.num_running + self.num_waiting

    def has_room(self, n: int) -> bool:
        """Say whether `n` more sequences may wait here."""
        return self.num_waiting + n <= self.max_waiting


class Worker(Protocol):
    """A worker that requests may be placed at."""

    @property
    def block_size(self) -> int:
        """Token slots of a block."""

    def placement_load(self) -> WorkerLoad:
        """Say how busy it is."""

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Say how many blocks of a prompt its prefix cache has; `hashes` from its beginning."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes."""

    index: int
    """Of the worker."""
    num_tokens: int
    """Known tokens that it has to compute for it, at most."""


class Placer:
    """Chooses; remembers only whose turn it is."""

    def __init__(
        self, placement: Placement = Placement.PREFIX, sequence_tokens: int = SEQUENCE_TOKENS
    ) -> None:
        self._placement = placement
        self._sequence_tokens = sequence_tokens
        self._num_placed = 0

    def choose(
        self, request: Request, workers: Sequence[Worker], *, can_refuse: bool
    ) -> Choice | None:
        """Choose the worker for a request.

        Args:
            request: One that is too long for all workers goes to one of those that take the most,
                which will refuse it and name the limit.
            workers: At least one.
            can_refuse: Whether only workers with room for it in their queue come into question.

        Returns:
            The first of equals; None: none has room.
        """
        loads = [worker.placement_load() for worker in workers]
        candidates = _candidates(request, loads, can_refuse=can_refuse)
        if not candidates:
            return None
        num_tokens = num_known_tokens(request)
        if len(candidates) == 1:
            return Choice(candidates[0], num_tokens)
        match self._placement:
            case Placement.PREFIX:
                num_left = _num_tokens_left(request, num_tokens, workers)
                index = min(candidates, key=lambda i: self._cost(num_left[i], loads[i]))
                return Choice(index, num_left[index])
            case Placement.LEAST_LOADED:
                return Choice(min(candidates, key=lambda i: loads[i].num_seqs), num_tokens)
            case Placement.ROUND_ROBIN:
                self._num_placed += 1
                return Choice(candidates[self._num_placed % len(candidates)], num_tokens)

    def _cost(self, num_tokens: int, load: WorkerLoad) -> int:
        return num_tokens + load.num_queued_tokens + self._sequence_tokens * load.num_seqs


def _num_tokens_left(request: Request, num_tokens: int, workers: Sequence[Worker]) -> list[int]:
    """Return how many of a request's known tokens each worker's prefix cache lacks."""
    size_to_hashes = {size: _hash(request, size) for size in {w.block_size for w in workers}}
    return [
        num_tokens - worker.num_cached_blocks(size_to_hashes[worker.block_size]) * worker.block_size
        for worker in workers
    ]


def num_known_tokens(request: Request) -> int:
    """Return how many tokens there are to compute before the request's next one, at most."""
    num_prompt_tokens = len(request.prompt_token_ids)
    outputs = [output for output in request.outputs if not output.finished]
    if not outputs:
        return num_prompt_tokens  # the siblings fork
    return sum(num_prompt_tokens + len(output.token_ids) for output in outputs)


def _hash(request: Request, block_size: int) -> list[BlockHash]:
    """Hash what admission can find: all of the prompt but its last token, or nothing."""
    hashes: list[BlockHash] = []
    if not request.reads_prefix_cache:
        return hashes
    root = root_hash(request.cache_salt)
    extend_chain(hashes, root, request.prompt_token_ids[:-1], block_size)
    return hashes


def _candidates(request: Request, loads: Sequence[WorkerLoad], *, can_refuse: bool) -> list[int]:
    n = num_live_seqs(request)
    num_tokens = len(request.prompt_token_ids) + request.max_tokens
    num_tokens = min(num_tokens, max(load.max_request_len for load in loads))
    found = [
        i
        for i, load in enumerate(loads)
        if load.max_request_len >= num_tokens and (load.has_room(n) or not can_refuse)
    ]
    short = {i for i in found if loads[i].is_memory_short}
    if all(loads[i].num_waiting for i in found if i not in short):
        short = {i for i in short if loads[i].num_waiting}  # the others would run dry
    return [i for i in found if i not in short] or found

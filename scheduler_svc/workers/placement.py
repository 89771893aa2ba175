"""Chooses the worker for a request, and keeps the requests that wait for a worker.

By default ("prefix") a request goes to the worker with the lowest cost, in tokens to compute::

    cost(worker) =   tokens of the request's prompt that the worker's prefix cache lacks
                   + prompt tokens that the worker must compute before this request
                   + SEQUENCE_TOKENS * sequences at the worker

The first two terms are the work before the request's first token. Mooncake's Conductor estimates
the same two terms (queue + prefill; Qin et al., FAST 2025), but as a time; tokens suffice here,
because the workers are alike. The third term is what decoding sequences cost each other, like
the load term of Preble (Srivatsa et al., ICLR 2025). Without the third term, all requests that
share a prefix would go to one worker as long as this worker's queue is short. If the first two
terms are the same for all workers, the worker with the fewest sequences is chosen.

With every method, workers that are short of memory are chosen last, and prompts go to workers that
prefill (`WorkerInfo.role`), if there are any. A decode worker takes a prompt if it has cached all
but a few of the prompt's tokens, and more of them than any prefill worker. For example, a decode
worker gets the next turn of a conversation whose last answer this worker decoded. Beam searches
cannot move to another worker, so they go to workers that decode.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol, TypeVar

import numpy as np

from contract.hashing import BlockHash, extend_chain, root_hash
from contract.info import Role
from scheduler_svc.core.interface.events import Finished
from scheduler_svc.core.interface.request import (
    FinishReason,
    OutputSoFar,
    Request,
    SeqKey,
    SourceId,
)
from scheduler_svc.domain import SubmitRequest, live_outputs, num_live_seqs

SEQUENCE_TOKENS: Final = 64
"""The number of prompt tokens that weigh as much as one sequence: a cached prefix of 2,048 tokens
weighs as much as 32 sequences. `bench/placement.py --sweep` shows that values from 16 to 256 do
about as well."""
MAX_BESIDE_DECODES: Final = 256
"""If there are prefill workers, a decode worker takes a prompt only if its prefix cache lacks at
most this many of the prompt's tokens. So few tokens hardly lengthen a step that decodes: every
step reads the weights, and while a GPU reads the weights of an 8B model, it can compute about 256
tokens."""
_NOTHING_YET = OutputSoFar(token_ids=np.empty(0, dtype=np.int32), finished=False)


class PlacementMethod(StrEnum):
    """The method of choosing a worker."""

    PREFIX = "prefix"
    """Choose the worker with the lowest cost (see the module's docstring)."""
    LEAST_LOADED = "least-loaded"
    """Choose the worker with the fewest sequences."""
    ROUND_ROBIN = "round-robin"
    """Choose each worker in turn."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy one worker is."""

    num_running: int
    num_waiting: int
    """Sequences in the queue of the worker's core, or on the way to this queue."""
    max_waiting: int
    max_request_len: int
    """The limit on the tokens of one sequence."""
    num_queued_tokens: int = 0
    """How many known tokens of waiting and prefilling sequences have not been computed yet. As in
    `num_waiting`, sequences on the way to the queue count, too."""
    is_memory_short: bool = False
    """Whether the worker is short of memory, which limits how many sequences it runs."""

    @property
    def num_seqs(self) -> int:
        return self.num_running + self.num_waiting

    def has_room(self, n: int) -> bool:
        """Return whether `n` more sequences may wait at the worker."""
        return self.num_waiting + n <= self.max_waiting


class HasRole(Protocol):
    """A worker with a role."""

    @property
    def role(self) -> Role:
        """The part of requests that the worker computes: prompts, decodes or both."""


_WorkerT = TypeVar("_WorkerT", bound=HasRole)


class Worker(HasRole, Protocol):
    """A worker that can take requests."""

    @property
    def block_size(self) -> int:
        """Number of token slots in a block."""

    def placement_load(self) -> WorkerLoad:
        """Return how busy the worker is."""

    def num_cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many blocks, from the first of `hashes` on, the worker has cached."""

    def expect(self, num_seqs: int, num_tokens: int) -> None:
        """Count sequences that will come, and the tokens to compute for them, as load."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The worker chosen for a request."""

    index: int
    num_tokens: int
    """An upper bound on the known tokens that the worker must compute for the request."""


class Placer:
    """Chooses workers. Its only state is the position of round-robin."""

    def __init__(
        self,
        placement: PlacementMethod = PlacementMethod.PREFIX,
        sequence_tokens: int = SEQUENCE_TOKENS,
    ) -> None:
        self._placement = placement
        self._sequence_tokens = sequence_tokens
        self._num_placed = 0

    def choose(
        self, request: Request, workers: Sequence[Worker], *, can_refuse: bool
    ) -> Choice | None:
        """Choose the worker for a request.

        Args:
            request: The request. If it is too long for every worker, it goes to a worker with the
                largest limit, which will refuse it and name the limit.
            workers: At least one worker.
            can_refuse: Whether the request may be refused. If it may, workers without room in
                their queues are excluded.

        Returns:
            The best worker, or the first of several equal ones; None: no worker has room.
        """
        loads = [worker.placement_load() for worker in workers]
        roles = [worker.role for worker in workers]
        num_tokens = num_known_tokens(request)
        own = _of_role(request, roles)
        if len(own) < len(workers) and request.beam is None:
            num_left = _num_tokens_left(request, num_tokens, workers)
            most = min(MAX_BESIDE_DECODES, min(num_left[i] for i in own) - 1)
            near = [i for i, left in enumerate(num_left) if left <= most and roles[i].decodes]
            own = _candidates(request, loads, near, can_refuse=can_refuse) or own
        candidates = _candidates(request, loads, own, can_refuse=can_refuse)
        if not candidates:
            return None
        if len(candidates) == 1:
            return Choice(candidates[0], num_tokens)
        match self._placement:
            case PlacementMethod.PREFIX:
                num_left = _num_tokens_left(request, num_tokens, workers)
                index = min(candidates, key=lambda i: self._cost(num_left[i], loads[i]))
                return Choice(index, num_left[index])
            case PlacementMethod.LEAST_LOADED:
                return Choice(min(candidates, key=lambda i: loads[i].num_seqs), num_tokens)
            case PlacementMethod.ROUND_ROBIN:
                self._num_placed += 1
                return Choice(candidates[self._num_placed % len(candidates)], num_tokens)

    def _cost(self, num_tokens: int, load: WorkerLoad) -> int:
        return num_tokens + load.num_queued_tokens + self._sequence_tokens * load.num_seqs


@dataclass(frozen=True, slots=True, eq=False)
class _Unplaced:
    command: SubmitRequest
    worker: Worker | None
    """The worker that gets a copy of the request's prefix; None: the request waits for any worker.
    """
    num_tokens: int
    """An upper bound on the known tokens that `worker` has to compute for the request."""

    def count(self, sign: int) -> None:
        """Add the request to its worker's load if `sign` is 1; subtract it if `sign` is -1."""
        if self.worker is not None:
            self.worker.expect(sign * num_live_seqs(self.command.request), sign * self.num_tokens)


class UnplacedRequests:
    """Requests that wait for a worker, oldest first; they are new, or their worker was lost.

    Among them are the requests that wait for a copy of their prefix. Such a request counts as load
    at the worker that gets the copy.
    """

    def __init__(self) -> None:
        self._waiting: list[_Unplaced] = []

    @property
    def num_seqs(self) -> int:
        """Number of live sequences of the waiting requests."""
        return sum(num_live_seqs(each.command.request) for each in self._waiting)

    def has_with(self, salt: str) -> bool:
        """Return whether a waiting request has a cache salt that begins with `salt`."""
        return any(each.command.request.cache_salt.startswith(salt) for each in self._waiting)

    def add(
        self, command: SubmitRequest, worker: Worker | None = None, num_tokens: int = 0
    ) -> None:
        """Add a request.

        If the request's prefix is being copied, `worker` gets the copy, and computes at most
        `num_tokens` tokens of the request.
        """
        self._keep(_Unplaced(command, worker, num_tokens))

    def take_all(self) -> list[SubmitRequest]:
        """Remove and return all commands."""
        return [each.command for each in self._take(lambda _: True)]

    def take_without_worker(self) -> list[SubmitRequest]:
        """Remove and return the commands that any worker may take: those without a `worker`."""
        return [each.command for each in self._take(lambda each: each.worker is None)]

    def take(self, source: SourceId, first_seq_key: SeqKey) -> SubmitRequest | None:
        """Remove and return the command of a request; None: no such request waits."""
        name = source, first_seq_key

        def is_it(each: _Unplaced) -> bool:
            request = each.command.request
            return (request.source, request.first_seq_key) == name

        return next((each.command for each in self._take(is_it)), None)

    def cancel(self, source: SourceId, seq_keys: Sequence[SeqKey]) -> tuple[Finished, ...]:
        """Cancel the waiting sequences among `seq_keys`; ignore the other keys."""
        keys = frozenset(seq_keys)
        finished: list[Finished] = []
        for each in self._take(lambda _: True):
            request = each.command.request
            first = request.first_seq_key
            ended = [i for i in live_outputs(request) if first + i in keys]
            if ended and request.beam is not None:
                ended = live_outputs(request)  # a search ends as a whole
            if request.source != source or not ended:
                self._keep(each)
                continue
            finished += (Finished(source, SeqKey(first + i), FinishReason.CANCELLED) for i in ended)
            rest = _without(request, ended)
            if num_live_seqs(rest):
                self._keep(replace(each, command=replace(each.command, request=rest)))
        return tuple(finished)

    def drop_source(self, source: SourceId) -> None:
        """Forget the requests of `source`, a router's stream that has ended."""
        self._take(lambda each: each.command.request.source == source)

    def _keep(self, waiting: _Unplaced) -> None:
        self._waiting.append(waiting)
        waiting.count(1)

    def _take(self, is_wanted: Callable[[_Unplaced], bool]) -> list[_Unplaced]:
        taken = [each for each in self._waiting if is_wanted(each)]
        if taken:
            self._waiting = [each for each in self._waiting if not is_wanted(each)]
        for each in taken:
            each.count(-1)
        return taken


def _num_tokens_left(request: Request, num_tokens: int, workers: Sequence[Worker]) -> list[int]:
    """Return for each worker how many tokens of the request the worker has not cached."""
    size_to_hashes = {
        size: prompt_hashes(request, size) for size in {w.block_size for w in workers}
    }
    return [
        num_tokens - worker.num_cached_blocks(size_to_hashes[worker.block_size]) * worker.block_size
        for worker in workers
    ]


def num_known_tokens(request: Request) -> int:
    """Return an upper bound on the tokens to compute before the request's next token.

    It is a bound, because parts of the prompt may be cached, or shared by several outputs.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    outputs = [output for output in request.outputs if not output.finished]
    if not outputs:
        return num_prompt_tokens  # siblings fork from the first sequence
    return sum(num_prompt_tokens + len(output.token_ids) for output in outputs)


def prompt_hashes(request: Request, block_size: int) -> list[BlockHash]:
    """Hash the full blocks that admission looks up: those of the prompt without its last token."""
    hashes: list[BlockHash] = []
    if not request.reads_prefix_cache:
        return hashes
    root = root_hash(request.cache_salt)
    extend_chain(hashes, root, request.prompt_token_ids[:-1], block_size)
    return hashes


def for_prompts(workers: Sequence[_WorkerT]) -> Sequence[_WorkerT]:
    """Return the workers that prefill, or all workers if none does."""
    return [worker for worker in workers if worker.role.prefills] or workers


def _of_role(request: Request, roles: Sequence[Role]) -> list[int]:
    """Return the indexes of the workers whose role fits the request, or of all if none fits."""
    is_search = request.beam is not None
    own = [i for i, role in enumerate(roles) if (role.decodes if is_search else role.prefills)]
    return own or [*range(len(roles))]


def _candidates(
    request: Request, loads: Sequence[WorkerLoad], own: Sequence[int], *, can_refuse: bool
) -> list[int]:
    """Return the indexes of the workers that may take a request.

    Only the workers with the indexes `own` are considered. Workers that are short of memory are
    left out if another worker can take the request. But if sequences wait at every worker that has
    enough memory, the workers that are short of memory and at which no sequence waits are kept.
    """
    n = num_live_seqs(request)
    num_tokens = len(request.prompt_token_ids) + request.max_tokens
    num_tokens = min(num_tokens, max((loads[i].max_request_len for i in own), default=0))
    found = [
        i
        for i in own
        if loads[i].max_request_len >= num_tokens and (loads[i].has_room(n) or not can_refuse)
    ]
    short = {i for i in found if loads[i].is_memory_short}
    if all(loads[i].num_waiting for i in found if i not in short):
        # An idle worker helps even if its memory is short.
        short = {i for i in short if loads[i].num_waiting}
    return [i for i in found if i not in short] or found


def _without(request: Request, output_indices: Iterable[int]) -> Request:
    outputs = list(request.outputs) or [_NOTHING_YET] * request.n
    for index in output_indices:
        outputs[index] = replace(outputs[index], finished=True)
    return replace(request, outputs=tuple(outputs))

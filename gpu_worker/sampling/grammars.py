"""Keeps outputs to their grammars: which tokens may come next.

A row's grammar moves on with each token that the row samples. On a GPU that, and the next mask, is
done on a thread of its own as soon as the token is known, while the next step computes; the sampler
waits for it only if it comes late. On a CPU no core is free while a step computes, and two threads
that want Python's lock in turns cost more than the masks: there the sampler works them out when it
needs them. There, too, a row whose grammar forces a *run* of tokens, such as the rest of a key,
needs no masks for them, and nobody draws them if it wants nothing else of their logits. Grammars
are compiled on another thread, while the prompt is computed: one that takes longer than its prompt
holds up the step in which its row first samples.

Symbols: `S` sequences, `V` vocabulary, `W` words of 32 bits, one bit a token.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import llguidance
import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.memory.transfer import upload
from kernels import ops

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonThread:
    """What is submitted is done in order. One that hangs is left behind when the process ends.

    A `ThreadPoolExecutor` would be waited for, however long a device hangs.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> "Future[_T]":
        """Do this after all that was submitted before; the future has what comes of it."""
        future: Future[_T] = Future()

        def job() -> None:
            _settle(future, lambda: function(*args, **kwargs))

        self._jobs.put(job)
        return future

    def stop(self) -> None:
        """End the thread when it has done all; nothing may be submitted afterwards."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - it is the caller's who waits
        future.set_exception(error)


_MAX_COMPILED = 64
"""Grammars that are kept compiled: requests often share one."""


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokens:
    """What sequences of a step must sample: at least one has no choice. On the host."""

    places: npt.NDArray[np.int64]
    """int64[F]: which, ascending."""
    token_ids: npt.NDArray[np.int64]
    """int64[F]."""


class _Promise(Protocol):
    def result(self) -> None:
        """Wait until it is done, or do it; done once."""


class _AtNeed:
    """What is done when it is first asked for, by the thread that asks."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def result(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None  # and what it refers to


class _Row:
    """A row's place in its grammar, and what it may sample next. One thread at a time has it."""

    __slots__ = ("admitted", "forced", "is_stuck", "matcher", "run", "sampled")

    def __init__(self) -> None:
        self.matcher: llguidance.LLMatcher
        self.run: Sequence[int] = ()
        """Tokens that must come, the first of which may have been sampled."""
        self.sampled: list[int] = []
        """Those; the matcher is told of all at once, since it works out anew what it forces."""
        self.forced: int | None = None
        """The only token that may come next; None: what the mask admits."""
        self.admitted: npt.NDArray[np.int32]
        """int32[W], where none is forced: bit t % 32 of word t // 32 is token t's."""
        self.is_stuck = False
        """Whether none may come."""

    def take(self, token_id: int) -> bool:
        """Move on by a sampled token; whether the matcher has been told."""
        self.sampled.append(token_id)
        num_sampled = len(self.sampled)
        # It is another token than the run's if what else a row asks for suppresses that one.
        if num_sampled < len(self.run) and token_id == self.run[num_sampled - 1]:
            self.forced = self.run[num_sampled]
            return False
        self.matcher.consume_tokens(self.sampled)
        self.sampled.clear()
        return True


class StructuredOutput:
    """The grammars of the rows that have one, from `add` to `release`."""

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        *,
        is_beside: bool,
    ) -> None:
        """Follow no grammar yet.

        Args:
            tokenizer: A tokenizer.json.
            vocab_size: V.
            eos_token_ids: At least one.
            device: Where logits are.
            is_beside: Whether masks are worked out on a thread, beside the device's work.

        Raises:
            ValueError: It is no tokenizer that grammars can be followed with.
        """
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.read_text(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._vocab_size = vocab_size
        self._device = device
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._rows: dict[int, _Row] = {}
        self._begun: dict[int, Future[None]] = {}
        """Rows whose grammars may still be compiled: those that have not been looked at."""
        self._moves: list[_Promise] = []
        """By the tokens of steps since masks were last asked for."""
        self._compiler = DaemonThread("grammar compiler")
        self._thread = DaemonThread("grammars") if is_beside else None
        # Not beside: to ask needs Python's lock, and a GPU draws for all rows at once.
        self._asks_for_runs = not is_beside and self._tokenizer.is_canonical
        # What it is called for it does without Python's lock, for which the step would have to wait
        # once a row. One thread: it works beside the device, not against the host.
        self._executor = llguidance.LLExecutor(num_threads=1) if is_beside else None

    @property
    def has_any(self) -> bool:
        """Whether any row has a grammar."""
        return bool(self._rows)

    @property
    def may_force(self) -> bool:
        """Whether `forced` may say anything but None."""
        return self._asks_for_runs and bool(self._rows)

    def add(self, row: int, grammar: str, output_token_ids: Sequence[int]) -> None:
        """Give a free row its grammar, and the output that it has so far."""
        entry = self._rows[row] = _Row()

        def begin() -> None:
            entry.matcher = self._compile(grammar)
            entry.matcher.consume_tokens(list(output_token_ids))
            self._look([entry])

        self._begun[row] = self._compiler.submit(begin)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows; those that have no grammar are ignored."""
        for row in rows:
            self._rows.pop(row, None)
            self._begun.pop(row, None)
        if not self._rows:
            self._moves.clear()  # a step may have failed, and there will be no tokens

    def forced(self, rows: Sequence[int], places: npt.NDArray[np.int64]) -> ForcedTokens | None:
        """Tell which rows have no choice; None: all have, as far as it is known.

        Args:
            rows: Those that have a grammar.
            places: int64[len(rows)], ascending: where they are in the step.
        """
        self._catch_up(rows)
        which, token_ids = [], []
        for i, row in enumerate(rows):
            token_id = self._rows[row].forced
            if token_id is not None:
                which.append(i)
                token_ids.append(token_id)
        if not which:
            return None
        return ForcedTokens(places[which], np.array(token_ids, np.int64))

    def restrict(
        self, logits: torch.Tensor, rows: Sequence[int], places: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Suppress what the grammars do not admit.

        Args:
            logits: float32[S, V] on the device; changed.
            rows: Those that have a grammar.
            places: int64[len(rows)]: where their logits are.

        Returns:
            int64[F] on the host: the places of rows whose grammar cannot be followed any further.
        """
        self._catch_up(rows)
        entries = [self._rows[row] for row in rows]
        # Not `stack`, which takes three times as long.
        admitted = np.concatenate([self._mask_of(entry) for entry in entries])
        ops.suppress(logits, *upload([places, admitted.reshape(len(rows), -1)], self._device))
        return places[[i for i, entry in enumerate(entries) if entry.is_stuck]]

    def expect(
        self,
        rows: Sequence[int],
        places: npt.NDArray[np.int64],
        token_ids: Callable[[], npt.NDArray[np.int64]],
    ) -> None:
        """Let the grammars of `rows` move on by the tokens that they sample.

        Args:
            rows: Those that have a grammar.
            places: int64[len(rows)]: where their tokens are among `token_ids`.
            token_ids: Waits for the step's tokens; called on the thread, or by `restrict` or
                `forced`.
        """
        entries = [self._rows[row] for row in rows]

        def move() -> None:
            taken = zip(entries, token_ids()[places].tolist(), strict=True)
            # Here, since the executor's thread would take longer to wake than a token to consume.
            self._look([entry for entry, token_id in taken if entry.take(token_id)])

        # One job for all: to hand a job over costs more than to work out a mask.
        self._moves.append(_AtNeed(move) if self._thread is None else self._thread.submit(move))

    def close(self) -> None:
        """End the threads when they have done what they were given."""
        self._compiler.stop()
        if self._thread is not None:
            self._thread.stop()

    def _catch_up(self, rows: Sequence[int]) -> None:
        """Let `rows`, and all that have moved, be where their tokens have brought them."""
        for move in self._moves:
            move.result()
        self._moves.clear()
        if self._begun:
            for row in rows:
                if row in self._begun:
                    self._begun.pop(row).result()

    def _look(self, entries: Sequence[_Row]) -> None:
        """Work out which tokens may come next; none may if a grammar is lost."""
        free = entries
        if self._asks_for_runs:
            free = []
            for entry in entries:
                entry.run = entry.matcher.compute_ff_tokens()
                entry.forced = entry.run[0] if entry.run else None
                if entry.forced is None:
                    free.append(entry)
        if not free:
            return
        admitted = np.empty((len(free), -(-self._vocab_size // 32)), np.int32)
        start, row_bytes = admitted.ctypes.data, admitted.strides[0]
        if self._executor is None:
            for place, entry in enumerate(free):
                entry.matcher.unsafe_compute_mask_ptr(start + place * row_bytes, row_bytes)
        else:
            numbered = [(entry.matcher, place) for place, entry in enumerate(free)]
            self._executor.unsafe_compute_mask_ptr(numbered, start, row_bytes, len(free))
        for entry, mask in zip(free, admitted, strict=True):
            entry.admitted = mask
            # One may turn out only now to be too complex. Others admit some token, or it ends them.
            if entry.matcher.is_error():
                entry.is_stuck = True
                mask[:] = 0

    def _mask_of(self, entry: _Row) -> npt.NDArray[np.int32]:
        if entry.forced is None:
            return entry.admitted
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[entry.forced] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].deep_copy()

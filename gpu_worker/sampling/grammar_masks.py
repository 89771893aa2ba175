"""Structured output: computes which tokens each row's grammar allows next, and masks the others.

A row's grammar advances with each token that the row samples. On a GPU, a separate thread advances
the grammar and computes the next mask as soon as the token is known, while the next step computes.
The sampler waits only if this thread is late.

On a CPU, the sampler itself computes masks when it needs them. A separate thread would find no free
core during a step, and two threads that compete for the GIL cost more than the masks. If a grammar
forces a *run* of tokens, such as the rest of a key in JSON, the sampler on a CPU needs no masks for
the run, and usually no logits.

Grammars are compiled on another thread while the prompt is computed. If the compilation takes
longer than the prompt, the step in which the row first samples waits for the grammar.

Symbols: `S` sequences, `V` vocabulary, `W` words of 32 bits, one bit per token.
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
import torch

from contract.arrays import Int32Array, Int64Array
from gpu_worker.memory.transfer import upload
from kernels import ops

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonThread:
    """Runs jobs in order on a daemon thread, which never keeps the process alive.

    At exit, Python would wait for a thread of a `ThreadPoolExecutor`, even if the thread's job
    hangs in a device's driver.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> "Future[_T]":
        """Queue a call; the future gets its result."""
        future: Future[_T] = Future()

        def job() -> None:
            _settle(future, lambda: function(*args, **kwargs))

        self._jobs.put(job)
        return future

    def stop(self) -> None:
        """End the thread after all queued jobs. Nothing may be submitted afterwards."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)


_MAX_COMPILED = 64
"""Number of compiled grammars to keep; requests often share one."""


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokens:
    """Tokens that some sequences of a step must sample, on the host. There is at least one."""

    places: Int64Array
    """int64[F]: which sequences, ascending."""
    token_ids: Int64Array
    """int64[F]."""


class _Promise(Protocol):
    def result(self) -> None:
        """Wait until the work is done. If no other thread does the work, the first caller does."""


class _AtNeed:
    """Work that is done when its result is first requested, by the thread that requests it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def result(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None  # frees the objects that the work refers to


class _Row:
    """A row's position in its grammar, and the tokens allowed next.

    Used by one thread at a time.
    """

    __slots__ = ("admitted", "forced", "is_stuck", "matcher", "run", "sampled")

    def __init__(self) -> None:
        self.matcher: llguidance.LLMatcher
        self.run: Sequence[int] = ()
        """The tokens that the grammar forces; the row may have sampled the first few already."""
        self.sampled: list[int] = []
        """The tokens of `run` that the row has sampled. The matcher gets them together, at the end
        of the run. If it got them one by one, `_look` would compute the forced tokens again after
        each of them."""
        self.forced: int | None = None
        """The only token allowed next. None: several may be allowed, as `admitted` says."""
        self.admitted: Int32Array
        """int32[W], valid if `forced` is None. Token t is allowed if bit t % 32 of word t // 32 is
        set."""
        self.is_stuck = False
        """Whether no token is allowed."""

    def advance(self, token_id: int) -> bool:
        """Advance by a sampled token; return whether the matcher has it now.

        If the token is part of a run, the matcher gets it only at the end of the run.
        """
        self.sampled.append(token_id)
        num_sampled = len(self.sampled)
        # The row may sample another token if its other parameters suppress the run's token.
        if num_sampled < len(self.run) and token_id == self.run[num_sampled - 1]:
            self.forced = self.run[num_sampled]
            return False
        self.matcher.consume_tokens(self.sampled)
        self.sampled.clear()
        return True


class RowGrammars:
    """The grammars of rows. A row has its grammar from `add` to `release`."""

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        *,
        is_beside: bool,
    ) -> None:
        """Load the tokenizer whose tokens the grammars allow or forbid.

        Args:
            tokenizer: A tokenizer.json.
            vocab_size: V.
            eos_token_ids: At least one.
            device: Where logits are.
            is_beside: Whether a separate thread computes masks while the device computes.

        Raises:
            ValueError: The tokenizer cannot be used for grammars.
        """
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.read_text(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._vocab_size = vocab_size
        self._device = device
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._rows: dict[int, _Row] = {}
        self._begun: dict[int, Future[None]] = {}
        """Compilation of grammars whose rows have not sampled yet, by row."""
        self._moves: list[_Promise] = []
        """Jobs that advance grammars: one for each call of `expect` since the last `_catch_up`."""
        self._compiler = DaemonThread("grammar compiler")
        self._thread = DaemonThread("grammars") if is_beside else None
        # Runs are not used on a GPU: finding them takes the GIL, and a GPU draws all rows at once.
        self._asks_for_runs = not is_beside and self._tokenizer.is_canonical
        # The executor computes masks without the GIL, for which the step would otherwise wait once
        # per row. It has one thread, so that it does not compete with the step for the host.
        self._executor = llguidance.LLExecutor(num_threads=1) if is_beside else None

    @property
    def has_any(self) -> bool:
        return bool(self._rows)

    @property
    def may_force(self) -> bool:
        """Whether `forced` may return tokens."""
        return self._asks_for_runs and bool(self._rows)

    def add(self, row: int, grammar: str, output_token_ids: Sequence[int]) -> None:
        """Give a free row its grammar, and advance it by the output tokens that the row has."""
        entry = self._rows[row] = _Row()

        def begin() -> None:
            entry.matcher = self._compile(grammar)
            entry.matcher.consume_tokens(list(output_token_ids))
            self._look([entry])

        self._begun[row] = self._compiler.submit(begin)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows; rows without a grammar are ignored."""
        for row in rows:
            self._rows.pop(row, None)
            self._begun.pop(row, None)
        if not self._rows:
            self._moves.clear()  # the tokens of a failed step never come

    def forced(self, rows: Sequence[int], places: Int64Array) -> ForcedTokens | None:
        """Return the tokens that the grammars of `rows` force; None if these grammars force none.

        Args:
            rows: Rows that have a grammar.
            places: int64[len(rows)], ascending: the index of each row's sequence in the step.
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

    def restrict(self, logits: torch.Tensor, rows: Sequence[int], places: Int64Array) -> Int64Array:
        """Set to -inf the logits of tokens that the grammars do not allow.

        Args:
            logits: float32[S, V] on the device; changed in place.
            rows: Rows that have a grammar.
            places: int64[len(rows)]: where each row's logits are in `logits`.

        Returns:
            int64[*] on the host: the `places` of rows whose grammar allows no token.
        """
        self._catch_up(rows)
        entries = [self._rows[row] for row in rows]
        # `np.stack` takes three times as long.
        admitted = np.concatenate([self._mask_of(entry) for entry in entries])
        ops.suppress(logits, *upload([places, admitted.reshape(len(rows), -1)], self._device))
        return places[[i for i, entry in enumerate(entries) if entry.is_stuck]]

    def expect(
        self, rows: Sequence[int], places: Int64Array, token_ids: Callable[[], Int64Array]
    ) -> None:
        """Advance the grammars of `rows` by the tokens that they sample.

        Args:
            rows: Rows that have a grammar.
            places: int64[len(rows)]: where each row's token is in the result of `token_ids`.
            token_ids: Waits for the step's tokens and returns them. It is called by the thread that
                advances grammars or, without such a thread, by the next `restrict` or `forced`.
        """
        entries = [self._rows[row] for row in rows]

        def move() -> None:
            taken = zip(entries, token_ids()[places].tolist(), strict=True)
            # Tokens are consumed here, because waking the executor's thread takes longer than
            # consuming a token.
            self._look([entry for entry, token_id in taken if entry.advance(token_id)])

        # One job advances all rows, because handing over a job costs more than computing a mask.
        self._moves.append(_AtNeed(move) if self._thread is None else self._thread.submit(move))

    def close(self) -> None:
        """End the threads after their queued jobs."""
        self._compiler.stop()
        if self._thread is not None:
            self._thread.stop()

    def _catch_up(self, rows: Sequence[int]) -> None:
        """Advance all grammars by the sampled tokens; finish compiling the grammars of `rows`."""
        for move in self._moves:
            move.result()
        self._moves.clear()
        if self._begun:
            for row in rows:
                if row in self._begun:
                    self._begun.pop(row).result()

    def _look(self, entries: Sequence[_Row]) -> None:
        """Compute which tokens each entry allows next: none if the entry's matcher has failed."""
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
            # It may turn out only now that a grammar is too complex. Otherwise a matcher allows
            # some token, or the row ends.
            if entry.matcher.is_error():
                entry.is_stuck = True
                mask[:] = 0

    def _mask_of(self, entry: _Row) -> Int32Array:
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

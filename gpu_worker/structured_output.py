"""Keeps outputs to their grammars: which tokens may come next.

A row's grammar moves on with each token that the row samples. On a GPU that, and the next mask, is
done on a thread of its own as soon as the token is known, while the next step computes; the sampler
waits for it only if it comes late. On a CPU no core is free while a step computes, and two threads
that want Python's lock in turns cost more than the masks: there the sampler works them out when it
needs them. Grammars are compiled on another thread, while the prompt is computed: one that takes
longer than its prompt holds up the step in which its row first samples.

Symbols: `S` sequences, `V` vocabulary, `W` words of 32 bits, one bit a token.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import llguidance
import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.daemon_thread import DaemonThread
from gpu_worker.upload import upload
from kernels import ops

_MAX_COMPILED = 64
"""Grammars that are kept compiled: requests often share one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Masks:
    """What rows that were advanced together may sample next."""

    admitted: npt.NDArray[np.int32]
    """int32[*, W]: bit t % 32 of word t // 32 is token t's."""
    stuck: frozenset[int]
    """Which of them are of rows that may sample nothing."""


class _Promise(Protocol):
    def result(self) -> _Masks:
        """Wait for the masks, or work them out; always the same ones."""


class _AtNeed:
    """What is worked out when it is first asked for, by the thread that asks."""

    def __init__(self, work: Callable[[], _Masks]) -> None:
        self._work: Callable[[], _Masks] | None = work
        self._masks: _Masks | None = None

    def result(self) -> _Masks:
        if self._masks is None:
            assert self._work is not None
            self._masks = self._work()
            self._work = None  # and what it refers to
        return self._masks


class _Row:
    """A row's place in its grammar. `matcher` is touched by one thread at a time."""

    def __init__(self) -> None:
        self.matcher: llguidance.LLMatcher | None = None
        self.masks: _Promise | None = None
        self.place = 0
        """Which of them is this row's."""


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
        self._compiler = DaemonThread("grammar compiler")
        self._thread = DaemonThread("grammars") if is_beside else None
        # What it is called for it does without Python's lock, for which the step would have to wait
        # once a row. One thread: it works beside the device, not against the host.
        self._executor = llguidance.LLExecutor(num_threads=1) if is_beside else None

    def add(self, row: int, grammar: str, output_token_ids: Sequence[int]) -> None:
        """Give a free row its grammar, and the output that it has so far."""
        entry = self._rows[row] = _Row()

        def begin() -> _Masks:
            entry.matcher = self._compile(grammar)
            entry.matcher.consume_tokens(list(output_token_ids))
            return self._masks([entry.matcher])

        entry.masks = self._compiler.submit(begin)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows; those that have no grammar are ignored."""
        for row in rows:
            self._rows.pop(row, None)

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
        entries = [self._rows[row] for row in rows]
        masks = [(entry.masks.result(), entry.place) for entry in entries if entry.masks]
        # Not `stack`, which takes three times as long.
        admitted = np.concatenate([mask.admitted[place] for mask, place in masks])
        admitted = admitted.reshape(len(rows), -1)
        ops.suppress(logits, *upload([places, admitted], self._device))
        return places[[i for i, (mask, place) in enumerate(masks) if place in mask.stuck]]

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
            token_ids: Waits for the step's tokens; called on the thread, or by `restrict`.
        """
        entries = [self._rows[row] for row in rows]

        def advance() -> _Masks:
            matchers = [entry.matcher for entry in entries if entry.matcher is not None]
            # Here, since the executor's thread would take longer to wake than a token to consume.
            for matcher, token_id in zip(matchers, token_ids()[places].tolist(), strict=True):
                matcher.consume_token(token_id)
            return self._masks(matchers)

        # One job for all: to hand a job over costs more than to work out a mask.
        masks = _AtNeed(advance) if self._thread is None else self._thread.submit(advance)
        for place, entry in enumerate(entries):
            entry.masks, entry.place = masks, place

    def close(self) -> None:
        """End the threads when they have done what they were given."""
        self._compiler.stop()
        if self._thread is not None:
            self._thread.stop()

    def _masks(self, matchers: Sequence[llguidance.LLMatcher]) -> _Masks:
        """Work out which tokens may come next; none may if a grammar is lost."""
        admitted = np.zeros((len(matchers), -(-self._vocab_size // 32)), np.int32)
        start, row_bytes = admitted.ctypes.data, admitted.strides[0]
        if self._executor is None:
            for place, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(start + place * row_bytes, row_bytes)
        else:
            numbered = [(matcher, place) for place, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(numbered, start, row_bytes, len(matchers))
        for place, matcher in enumerate(matchers):
            if matcher.is_error():  # too complex, as it may turn out only now
                admitted[place] = 0
        return _Masks(admitted, frozenset(np.nonzero(~admitted.any(1))[0].tolist()))

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].deep_copy()

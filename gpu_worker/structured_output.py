"""Keeps outputs to their grammars: which tokens may come next, worked out beside the device's work.

A row's grammar moves on with each token that the row samples. That, and the next mask, is done on a
thread of its own as soon as the token is known, while the next step computes; the sampler waits for
it only if it comes late. Grammars are compiled on another thread, while the prompt is computed: one
that takes longer than its prompt holds up the step in which its row first samples.

Symbols: `S` sequences, `V` vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.daemon_thread import DaemonThread
from gpu_worker.upload import upload

_MAX_COMPILED = 64
"""Grammars that are kept compiled: requests often share one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Masks:
    """What rows that were advanced together may not sample next."""

    is_suppressed: npt.NDArray[np.bool_]
    """bool[*, V]."""
    is_stuck: npt.NDArray[np.bool_]
    """bool[*]: whether that is everything."""


class _Row:
    """A row's place in its grammar. `matcher` is touched by one thread at a time."""

    def __init__(self) -> None:
        self.matcher: llguidance.LLMatcher | None = None
        self.masks: Future[_Masks] | None = None
        self.place = 0
        """Which of them is this row's."""


class StructuredOutput:
    """The grammars of the rows that have one, from `add` to `release`."""

    def __init__(
        self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        """`tokenizer` is a tokenizer.json; there is at least one of `eos_token_ids`.

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
        self._thread = DaemonThread("grammars")

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
        suppressed = [mask.is_suppressed[place] for mask, place in masks]
        if self._device.type == "cpu":  # row by row numpy takes a quarter of the time of torch
            scores = logits.numpy()
            for place, is_suppressed in zip(places.tolist(), suppressed, strict=True):
                np.copyto(scores[place], -np.inf, where=is_suppressed)
        else:
            all_suppressed, index = upload([np.stack(suppressed), places], self._device)
            restricted = logits.index_select(0, index).masked_fill_(all_suppressed, -torch.inf)
            logits.index_copy_(0, index, restricted)
        stuck: npt.NDArray[np.int64] = places[[mask.is_stuck[place] for mask, place in masks]]
        return stuck

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
            token_ids: Waits for the step's tokens; called on the thread.
        """
        entries = [self._rows[row] for row in rows]

        def advance() -> _Masks:
            matchers = [entry.matcher for entry in entries if entry.matcher is not None]
            for matcher, token_id in zip(matchers, token_ids()[places].tolist(), strict=True):
                matcher.consume_token(token_id)
            return self._masks(matchers)

        # One job for all: to hand a job over costs more than to work out a mask.
        masks = self._thread.submit(advance)
        for place, entry in enumerate(entries):
            entry.masks, entry.place = masks, place

    def close(self) -> None:
        """End the threads when they have done what they were given."""
        self._compiler.stop()
        self._thread.stop()

    def _masks(self, matchers: Sequence[llguidance.LLMatcher]) -> _Masks:
        """Work out which tokens may not come next; none may if a grammar is lost."""
        admitted = np.zeros((len(matchers), -(-self._vocab_size // 32)), np.int32)  # bits
        first = admitted.ctypes.data  # to ask for it costs more than a mask
        num_bytes = admitted.strides[0]
        for place, matcher in enumerate(matchers):
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(first + place * num_bytes, num_bytes)
            if matcher.is_error():  # too complex, as it may turn out only now
                admitted[place] = 0
        is_stuck: npt.NDArray[np.bool_] = np.logical_not(admitted.any(1))
        suppressed = np.invert(admitted, out=admitted).view(np.uint8)
        bits = np.unpackbits(suppressed, axis=1, count=self._vocab_size, bitorder="little")
        return _Masks(bits.view(np.bool_), is_stuck)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].deep_copy()

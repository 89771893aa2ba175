"""Keeps outputs to their grammars: which tokens may come next.

A row's grammar moves on with each token that the row samples. On a GPU that, and the next mask, is
done on a thread of its own as soon as the token is known, while the next step computes; the sampler
waits for it only if it comes late. On a CPU no core is free while a step computes, and two threads
that want Python's lock in turns cost more than the masks: there the sampler works them out when it
needs them. There, too, a row whose grammar forces a *run* of tokens, such as the rest of a key,
needs no masks for them, and nobody draws them. Grammars are compiled on another thread, while the
prompt is computed: one that takes longer than its prompt holds up the step in which its row first
samples.

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
class Restriction:
    """What grammars leave a step's sequences to sample; on the host."""

    stuck: npt.NDArray[np.int64]
    """int64[*]: the places of those that may sample nothing: they cannot go on."""
    forced: npt.NDArray[np.int64]
    """int64[F]: the places of those that may sample one token only, and whose logits are left."""
    forced_token_ids: npt.NDArray[np.int64]
    """int64[F]: that token."""


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """What rows that were advanced together may sample next."""

    forced: Sequence[int | None]
    """Of each, the only token; None: what its mask admits."""
    admitted: npt.NDArray[np.int32]
    """int32[*, W]: bit t % 32 of word t // 32 is token t's; anything where a token is forced."""
    stuck: frozenset[int]
    """Which of them are of rows that may sample nothing."""


class _Promise(Protocol):
    def result(self) -> _Choices:
        """Wait for the choices, or work them out; always the same ones."""


class _AtNeed:
    """What is worked out when it is first asked for, by the thread that asks."""

    def __init__(self, work: Callable[[], _Choices]) -> None:
        self._work: Callable[[], _Choices] | None = work
        self._choices: _Choices | None = None

    def result(self) -> _Choices:
        if self._choices is None:
            assert self._work is not None
            self._choices = self._work()
            self._work = None  # and what it refers to
        return self._choices


class _Follower:
    """Follows a grammar along one output. One thread at a time calls it."""

    def __init__(
        self, matcher: llguidance.LLMatcher, output_token_ids: Sequence[int], *, asks_for_runs: bool
    ) -> None:
        """Begin with the output that there is; `matcher` is this follower's own."""
        self.matcher = matcher
        """Where the grammar is, but for the tokens of the run."""
        self._asks_for_runs = asks_for_runs
        self._sampled = list(output_token_ids)
        """What the matcher has not been told of."""
        self._run: Sequence[int] = ()
        """Tokens that must come, the first of which may have been sampled."""
        self._go_on()

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: perhaps there are several."""
        return self._run[len(self._sampled)] if self._run else None

    def take(self, token_id: int) -> None:
        """Move on by a token that has been sampled."""
        self._sampled.append(token_id)
        if len(self._sampled) >= len(self._run):
            self._go_on()

    def _go_on(self) -> None:
        """Tell the matcher all at once: each time it would work out again what it forces."""
        self.matcher.consume_tokens(self._sampled)
        self._sampled = []
        if self._asks_for_runs:
            self._run = self.matcher.compute_ff_tokens()


class _Row:
    """What a row follows and may sample next."""

    def __init__(self) -> None:
        self.follower: _Follower | None = None
        """Touched by one thread at a time; None until its grammar is compiled."""
        self.choices: _Promise | None = None
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
        # It is not asked for runs: that needs Python's lock, and a GPU draws for all rows at once.
        # What it is called for it does without Python's lock, for which the step would have to wait
        # once a row. One thread: it works beside the device, not against the host.
        self._executor = llguidance.LLExecutor(num_threads=1) if is_beside else None

    def add(self, row: int, grammar: str, output_token_ids: Sequence[int]) -> None:
        """Give a free row its grammar, and the output that it has so far."""
        entry = self._rows[row] = _Row()

        def begin() -> _Choices:
            entry.follower = _Follower(
                self._compile(grammar), output_token_ids, asks_for_runs=self._thread is None
            )
            return self._choices([entry.follower])

        entry.choices = self._compiler.submit(begin)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows; those that have no grammar are ignored."""
        for row in rows:
            self._rows.pop(row, None)

    def restrict(
        self, logits: torch.Tensor, rows: Sequence[int], places: npt.NDArray[np.int64]
    ) -> Restriction:
        """Suppress what the grammars do not admit, where they leave a choice.

        Args:
            logits: float32[S, V] on the device; changed.
            rows: Those that have a grammar.
            places: int64[len(rows)]: where their logits are.
        """
        entries = [self._rows[row] for row in rows]
        chosen = [(entry.choices.result(), entry.place) for entry in entries if entry.choices]
        token_ids = [choices.forced[place] for choices, place in chosen]
        free = [i for i, token_id in enumerate(token_ids) if token_id is None]
        if free:
            # Not `stack`, which takes three times as long.
            admitted = np.concatenate([chosen[i][0].admitted[chosen[i][1]] for i in free])
            admitted = admitted.reshape(len(free), -1)
            ops.suppress(logits, *upload([places[free], admitted], self._device))
        return Restriction(
            places[[i for i in free if chosen[i][1] in chosen[i][0].stuck]],
            places[[i for i, token_id in enumerate(token_ids) if token_id is not None]],
            np.array([token_id for token_id in token_ids if token_id is not None], np.int64),
        )

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

        def advance() -> _Choices:
            followers = [entry.follower for entry in entries if entry.follower is not None]
            # Here, since the executor's thread would take longer to wake than a token to consume.
            for follower, token_id in zip(followers, token_ids()[places].tolist(), strict=True):
                follower.take(token_id)
            return self._choices(followers)

        # One job for all: to hand a job over costs more than to work out a mask.
        choices = _AtNeed(advance) if self._thread is None else self._thread.submit(advance)
        for place, entry in enumerate(entries):
            entry.choices, entry.place = choices, place

    def close(self) -> None:
        """End the threads when they have done what they were given."""
        self._compiler.stop()
        if self._thread is not None:
            self._thread.stop()

    def _choices(self, followers: Sequence[_Follower]) -> _Choices:
        """Work out which tokens may come next; none may if a grammar is lost."""
        forced = [follower.forced for follower in followers]
        free = [
            (follower.matcher, place)
            for place, follower in enumerate(followers)
            if forced[place] is None
        ]
        admitted = np.empty((len(followers), -(-self._vocab_size // 32)), np.int32)
        start, row_bytes = admitted.ctypes.data, admitted.strides[0]
        if self._executor is None:
            for matcher, place in free:
                matcher.unsafe_compute_mask_ptr(start + place * row_bytes, row_bytes)
        else:
            self._executor.unsafe_compute_mask_ptr(free, start, row_bytes, len(followers))
        # One may turn out only now to be too complex. Others admit some token, or it is their end.
        stuck = [place for matcher, place in free if matcher.is_error()]
        admitted[stuck] = 0
        return _Choices(forced, admitted, frozenset(stuck))

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].deep_copy()

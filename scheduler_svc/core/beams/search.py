"""The beam search algorithm: it chooses the continuations to keep, and decides when to end.

The algorithm follows `transformers`' `generate(num_beams=width, do_sample=False)` step by step, and
in float32, so that the outputs are equal token for token. A *continuation* is a beam with one more
token. Each step considers the `BeamParams.num_kept` likeliest continuations of all beams, best
first. A continuation ends with an end token or at the maximum length. If one of the first `width`
continuations ends, it becomes a hypothesis; the best `width` hypotheses are kept. Of the
continuations that do not end, the first `width` become the next beams.

If continuations of different beams are equally likely, the continuation of the better beam comes
first. Equally likely continuations of one beam keep the order in which the worker reported them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.arrays import Float32Array, Int32Array
from contract.sampling import EarlyStopping
from contract.step import OutputState, SearchState
from scheduler_svc.core.interface.request import BeamParams


@dataclass(frozen=True, slots=True, eq=False)
class BeamCandidates:
    """The likeliest next tokens of one beam, best first; the arrays are parallel."""

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """An output that has not ended."""

    token_ids: Int32Array
    """The tokens of the prompt and of the output so far."""
    logprob: np.float32
    """The sum of the output tokens' log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """An output that has ended."""

    token_ids: Int32Array
    """The output, including its end token if it has one, without the prompt."""
    logprob: np.float32
    score: np.float32
    end_token_id: int | None
    """The token that ended the output; None: the output reached its maximum length."""


class BeamSearcher:
    """One search: its current beams and hypotheses."""

    def __init__(
        self,
        params: BeamParams,
        prompt_token_ids: Int32Array,
        *,
        max_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        """Start with one beam, the prompt. Outputs have `min_tokens` to `max_tokens` tokens."""
        self.params = params
        self.beams: tuple[Beam, ...] = (Beam(prompt_token_ids, np.float32(0)),)
        """The beams, best first, all of the same length; empty when the search has ended."""
        self.hypotheses: tuple[Hypothesis, ...] = ()
        """The best hypotheses so far, at most `width` of them, best first."""
        self._num_prompt_tokens = len(prompt_token_ids)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._end_token_ids = np.array(params.end_token_ids, np.int32)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of each beam, including the prompt."""
        return len(self.beams[0].token_ids)

    @property
    def state(self) -> SearchState:
        """The state to pass to `resume` later; read it only while the search has beams."""
        best, start = self.beams[0].token_ids, self._num_prompt_tokens
        return SearchState(
            tuple(_beside(best, 0, beam.token_ids, beam.logprob) for beam in self.beams),
            tuple(_beside(best, start, h.token_ids, h.logprob) for h in self.hypotheses),
        )

    def resume(self, state: SearchState, best: Int32Array) -> bool:
        """Continue a new search from a saved state.

        Return False, and change nothing, if the state contradicts `best` or the parameters.

        Args:
            state: The state of a search with equal parameters.
            best: The prompt and output of the best beam of `state`; newer tokens may follow.
        """
        start = self._num_prompt_tokens
        both = (*state.beams, *state.hypotheses)
        if not all(start <= output.num_shared_tokens <= len(best) for output in both):
            return False
        beams, hypotheses = (
            [(np.concatenate([best[: o.num_shared_tokens], o.token_ids]), o.logprob) for o in some]
            for some in (state.beams, state.hypotheses)
        )
        lengths = {len(tokens) - start for tokens, _ in beams}
        most = max(len(beams), len(hypotheses))
        if len(lengths) != 1 or most > self.params.width or max(lengths) >= self._max_tokens:
            return False
        if not all(1 <= len(tokens) - start <= self._max_tokens for tokens, _ in hypotheses):
            return False
        self.beams = tuple(Beam(tokens, logprob) for tokens, logprob in beams)
        self.hypotheses = tuple(
            self._hypothesis(tokens[start:], logprob) for tokens, logprob in hypotheses
        )
        return True

    def advance(self, candidates: Sequence[BeamCandidates]) -> tuple[int, ...]:
        """Choose the next beams from `candidates`, which are parallel to `beams`.

        Each beam must have at least `num_kept` candidates; end tokens do not count before an output
        has `min_tokens` tokens. If the vocabulary is smaller than `num_kept`, each beam must have
        all tokens as candidates, and there may be fewer than `width` beams or hypotheses.

        Returns:
            For each new beam, the index of the old beam that it continues.
        """
        parents, token_ids, totals = self._likeliest(candidates)
        num_output_tokens = self.num_tokens + 1 - self._num_prompt_tokens
        is_end = np.isin(token_ids, self._end_token_ids)
        ends = is_end | (num_output_tokens == self._max_tokens)
        for index in np.flatnonzero(ends[: self.params.width]).tolist():
            output = self.beams[parents[index]].token_ids[self._num_prompt_tokens :]
            self._keep(self._hypothesis(np.append(output, token_ids[index]), totals[index]))
        next_ = np.flatnonzero(~ends)[: self.params.width].tolist()
        if not next_ or self._is_over(totals[next_[0]], num_output_tokens):
            self.beams = ()
            return ()
        self.beams = tuple(
            Beam(np.append(self.beams[parents[i]].token_ids, token_ids[i]), totals[i])
            for i in next_
        )
        return tuple(parents[next_].tolist())

    def _likeliest(
        self, candidates: Sequence[BeamCandidates]
    ) -> tuple[npt.NDArray[np.intp], Int32Array, Float32Array]:
        """Return beam, token and total log-probability of the `num_kept` likeliest continuations.

        The likeliest continuation comes first.
        """
        parents = np.repeat(np.arange(len(candidates)), [len(c.token_ids) for c in candidates])
        token_ids = np.concatenate([c.token_ids for c in candidates])
        totals = np.concatenate(
            [c.logprobs + beam.logprob for c, beam in zip(candidates, self.beams, strict=True)]
        )
        if self.num_tokens - self._num_prompt_tokens < self._min_tokens:
            allowed = ~np.isin(token_ids, self._end_token_ids)
            parents, token_ids, totals = parents[allowed], token_ids[allowed], totals[allowed]
        best = np.argsort(-totals, kind="stable")[: self.params.num_kept]
        return parents[best], token_ids[best], totals[best]

    def _hypothesis(self, token_ids: Int32Array, logprob: np.float32) -> Hypothesis:
        last, score = int(token_ids[-1]), self._score(logprob, len(token_ids))
        return Hypothesis(
            token_ids, logprob, score, last if last in self.params.end_token_ids else None
        )

    def _score(self, logprob: np.float32, num_output_tokens: int) -> np.float32:
        return np.float32(logprob / np.float32(num_output_tokens**self.params.length_penalty))

    def _keep(self, new: Hypothesis) -> None:
        # The sort is stable, so hypotheses with equal scores keep their order.
        hypotheses = sorted((*self.hypotheses, new), key=lambda h: h.score, reverse=True)
        self.hypotheses = tuple(hypotheses[: self.params.width])

    def _is_over(self, best_logprob: np.float32, num_output_tokens: int) -> bool:
        """Whether the search ends if the best beam has this log-probability and length."""
        if len(self.hypotheses) < self.params.width:
            return False
        if self.params.early_stopping is EarlyStopping.WHEN_FULL:
            return True
        length = num_output_tokens
        if self.params.early_stopping is EarlyStopping.NEVER and self.params.length_penalty > 0:
            length = self._max_tokens
        return not self._score(best_logprob, length) > self.hypotheses[-1].score


def num_common(one: Int32Array, other: Int32Array) -> int:
    """Return the length of the common prefix of two token lists."""
    num_both = min(len(one), len(other))
    differs = one[:num_both] != other[:num_both]
    return int(differs.argmax()) if differs.any() else num_both


def _beside(
    best: Int32Array, start: int, token_ids: Int32Array, logprob: np.float32
) -> OutputState:
    """Describe an output by its common prefix with `best`, and by the tokens that follow.

    `token_ids` lacks the output's first `start` tokens, which equal those of `best`.
    """
    num_common_tokens = num_common(best[start:], token_ids)
    return OutputState(start + num_common_tokens, token_ids[num_common_tokens:], logprob)

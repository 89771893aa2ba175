"""Samples: turns the logits of a step into one token per sequence.

Symbols: `S` sequences, `V` vocabulary, `L` sequences that want log-probabilities.

The order of operations is as in `quire.v1.SamplingParams`: log-probabilities of the raw logits,
penalties, bias, suppressed tokens, grammar, then a draw or an argmax. Each operation touches only
the sequences that need it: a batch of greedy sequences costs a check for non-finite values and an
argmax.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from contract.arrays import Int32Array, Int64Array
from contract.sampling import SamplingParams
from gpu_worker.memory.transfer import upload
from gpu_worker.sampling.draw import draw, uniforms
from gpu_worker.sampling.grammar_masks import ForcedTokens, RowGrammars
from gpu_worker.sampling.params import NO_TOKEN, SamplingTable
from gpu_worker.sampling.penalties import TokenCounts
from gpu_worker.sampling.sampled_tokens import Sampled, SampledLogprobs
from gpu_worker.sampling.truncation import truncate
from kernels import ops
from kernels.cpu.ops import draw as draw_of_all

_MIN_TEMPERATURE = np.float32(1e-30)
"""Keeps logits finite when they are divided by the temperature. Below this temperature the most
likely token has all the weight, as in greedy sampling."""
_LEAST: Final = torch.finfo(torch.float32).min
_LEAST_LOG: Final = -87.0
"""If x is less than about this number, exp(x) is a subnormal float32, which is slow to compute."""
_LEAST_WEIGHT: Final = 1.7e-38
"""Slightly above exp(_LEAST_LOG)."""
NO_SEQUENCES: Final = np.empty(0, np.int64)
"""The empty list of indexes."""


class Sampler:
    """Samples tokens; keeps each row's state from `add` to `release`."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        structured: RowGrammars | None = None,
    ) -> None:
        """`structured` may be None if no row ever has a grammar."""
        self._device = device
        self._structured = structured
        self._counts = TokenCounts(vocab_size, device)
        self.table = SamplingTable(max_num_seqs, vocab_size, eos_token_ids)

    def add(
        self, row: int, params: SamplingParams, token_ids: Int32Array, num_prompt_tokens: int
    ) -> None:
        """Give a free row its parameters; `token_ids` are its known tokens, prompt first."""
        self.table.set(row, params)
        if params.has_penalties:
            (known,) = upload([token_ids.astype(np.int64)], self._device)
            self._counts.add(row, known[:num_prompt_tokens], known[num_prompt_tokens:])
        if (grammar := params.grammar) is not None:
            assert self._structured is not None, "a row has a grammar only if the worker takes them"
            self._structured.add(row, grammar, token_ids[num_prompt_tokens:].tolist())

    def release(self, rows: Sequence[int]) -> None:
        self._counts.release(rows)
        if self._structured is not None:
            self._structured.release(rows)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        num_outputs: Int64Array,
        likeliest: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Sampled:
        """Sample the next token of each sequence; in rows with penalties, count the token.

        Args:
            logits: float32[S, V] on the device; on a GPU they may have 16 bits. `sample` may change
                this tensor.
            rows: int64[S]. A row may occur several times, at ascending positions, if it has neither
                penalties nor a grammar.
            positions: int64[S], the new token's index in its sequence.
            num_outputs: int64[S], the number of output tokens that the sequence has already.
            likeliest: The result of `ops.greedy` on the logits, if a graph has computed it.
                `sample` may change and return the tokens of this result.
        """
        table = self.table
        maxima, is_finite = self._likeliest(logits) if likeliest is None else likeliest
        if table.is_plain[rows].all():  # true in most steps
            token_ids, stuck = self._choose_admitted(logits, rows, positions, maxima)
            return Sampled(token_ids, is_finite, None, stuck)
        logits = logits.float()
        raw_logprobs, places = None, np.nonzero(table.wants_logprobs[rows])[0]
        if len(places):
            (index,) = upload([places], self._device)
            raw_logprobs = logits.index_select(0, index).log_softmax(1)  # [L, V]
        penalized = np.nonzero(table.has_penalties[rows])[0]
        slots = None
        if len(penalized):
            slots = self._penalize(logits, rows, penalized)
        self._add_bias(logits, rows)
        self._suppress_ends(logits, rows, num_outputs)
        self._suppress_others(logits, rows)
        token_ids, stuck = self._choose_admitted(logits, rows, positions, None)
        logprobs = None
        if raw_logprobs is not None:
            logprobs = self._logprobs(raw_logprobs, token_ids, rows, places)
        if slots is not None:  # last, because all of this is called again if memory is short
            (index,) = upload([penalized], self._device)
            self._counts.record(slots, token_ids.index_select(0, index))
        return Sampled(token_ids, is_finite, logprobs, stuck)

    def forced(self, rows: Int64Array) -> ForcedTokens | None:
        """Return the tokens that grammars force, which need no logits; None if there are none."""
        if self._structured is None or not self._structured.may_force:
            return None
        (places,) = (self.table.has_grammar[rows] & self.table.is_plain[rows]).nonzero()
        return self._structured.forced(rows[places].tolist(), places)

    def follow(self, rows: Int64Array, token_ids: Callable[[], Int64Array]) -> None:
        """Advance the grammars by a step's sampled tokens.

        Args:
            rows: int64[S], as for `sample`.
            token_ids: A function that waits for the step's tokens and returns them, int64[S]. It
                may be called on another thread.
        """
        if self._structured is None or not self._structured.has_any:
            return
        (places,) = self.table.has_grammar[rows].nonzero()
        if len(places):
            self._structured.expect(rows[places].tolist(), places, token_ids)

    def _penalize(self, logits: torch.Tensor, rows: Int64Array, places: Int64Array) -> torch.Tensor:
        """Penalize the sequences at `places`; return their slots in `TokenCounts`, int64[*]."""
        table, penalized = self.table, rows[places]
        index, slots, *factors = upload(
            [
                places,
                np.array(self._counts.slots(penalized.tolist()), np.int64),
                table.repetition_penalty[penalized, None],
                table.presence_penalty[penalized, None],
                table.frequency_penalty[penalized, None],
            ],
            self._device,
        )
        changed = self._counts.penalize(logits.index_select(0, index), slots, *factors)
        logits.index_copy_(0, index, changed)
        return slots

    def _add_bias(self, logits: torch.Tensor, rows: Int64Array) -> None:
        places = np.nonzero(self.table.has_bias[rows])[0]
        if not len(places):
            return
        biases = [self.table.bias[row] for row in rows[places].tolist()]
        index, token_ids, values = upload(
            [
                np.repeat(places, [len(ids) for ids, _ in biases]),
                np.concatenate([ids for ids, _ in biases]),
                np.concatenate([values for _, values in biases]),
            ],
            self._device,
        )
        logits.index_put_((index, token_ids), values, accumulate=True)

    def _suppress_ends(
        self, logits: torch.Tensor, rows: Int64Array, num_outputs: Int64Array
    ) -> None:
        places = np.nonzero(num_outputs < self.table.min_tokens[rows])[0]
        if not len(places):
            return
        ends = self.table.end_token_ids[rows[places]]
        which, column = np.nonzero(ends != NO_TOKEN)  # of each end token
        index, token_ids = upload([places[which], ends[which, column]], self._device)
        logits.index_put_((index, token_ids), logits.new_full((), -torch.inf))

    def _suppress_others(self, logits: torch.Tensor, rows: Int64Array) -> None:
        """In rows with `allowed_token_ids`, suppress all other tokens."""
        places = np.nonzero(self.table.is_limited[rows])[0]
        if not len(places):
            return
        allowed = [self.table.allowed[row] for row in rows[places].tolist()]
        limited, index, token_ids = upload(
            [places, np.repeat(places, list(map(len, allowed))), np.concatenate(allowed)],
            self._device,
        )
        kept = logits[index, token_ids]
        logits.index_fill_(0, limited, -torch.inf)
        logits.index_put_((index, token_ids), kept)

    def _likeliest(self, logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return each sequence's most likely token, and whether all its logits are finite.

        The results are int64[S] and bool[S]. On a GPU one pass computes both results. On a CPU the
        tokens are None, because `_argmax` finds them cheaply if they are needed.
        """
        return ops.greedy(logits) if logits.is_cuda else (None, finite_rows(logits))

    def _choose_admitted(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        likeliest: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Int64Array]:
        """Do as `_choose` does, but choose only tokens that the grammars allow.

        Also return the indexes of sequences whose grammar allows no token.
        """
        if self._structured is not None and self._structured.has_any:
            (places,) = self.table.has_grammar[rows].nonzero()
            if len(places):
                logits = logits.float()
                stuck = self._structured.restrict(logits, rows[places].tolist(), places)
                return self._choose(logits, rows, positions, None, is_suppressed=True), stuck
        is_limited = bool(self.table.is_limited[rows].any())
        return self._choose(
            logits, rows, positions, likeliest, is_suppressed=is_limited
        ), NO_SEQUENCES

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Int64Array,
        positions: Int64Array,
        likeliest: torch.Tensor | None,
        *,
        is_suppressed: bool,
    ) -> torch.Tensor:
        """Return int64[S]: the most likely token at temperature 0, otherwise a draw.

        `likeliest`: the most likely tokens, if they are known. `is_suppressed`: whether many logits
        may be -inf; if so, `_draw` computes exponentials in a way that is fast for such logits.
        """
        drawn = self.table.temperature[rows].nonzero()[0]
        if not len(drawn):
            return _argmax(logits) if likeliest is None else likeliest
        draw_tokens = (
            self._draw_by_kernel
            if logits.is_cuda
            else functools.partial(self._draw, is_suppressed=is_suppressed)
        )
        if len(drawn) == len(rows):
            return draw_tokens(logits, drawn, rows, positions)
        token_ids = _argmax(logits) if likeliest is None else likeliest
        (index,) = upload([drawn], self._device)
        drawn_ids = draw_tokens(logits, drawn, rows[drawn], positions[drawn])
        return token_ids.index_copy_(0, index, drawn_ids)

    def _draw(
        self,
        logits: torch.Tensor,
        places: Int64Array,
        rows: Int64Array,
        positions: Int64Array,
        *,
        is_suppressed: bool,
    ) -> torch.Tensor:
        """Return int64[len(rows)]: a token for each of `rows`, drawn by the logits at `places`."""
        table = self.table
        temperature = np.maximum(table.temperature[rows], _MIN_TEMPERATURE)  # [len(rows)]
        uniform = uniforms(table.seed[rows], positions)  # [len(rows)]
        is_cut = table.is_cut[rows]
        if not is_cut.any():
            return draw_of_all(logits, *upload([places, temperature, uniform], self._device))
        token_ids = torch.empty(len(rows), dtype=torch.int64)
        for draw_some, (which,) in (
            (draw_of_all, (~is_cut).nonzero()),
            (
                functools.partial(self._draw_cut, rows[is_cut], is_suppressed=is_suppressed),
                is_cut.nonzero(),
            ),
        ):
            given = upload([places[which], temperature[which], uniform[which]], self._device)
            token_ids[which] = draw_some(logits, *given)
        return token_ids

    def _draw_cut(
        self,
        rows: Int64Array,
        logits: torch.Tensor,
        places: torch.Tensor,
        temperature: torch.Tensor,
        uniform: torch.Tensor,
        *,
        is_suppressed: bool,
    ) -> torch.Tensor:
        """Do as `_draw` does, for rows with top_k, top_p or min_p."""
        table = self.table
        # Subtracting the maximum first prevents an overflow at any temperature. The maximum is -inf
        # if all tokens are suppressed.
        scaled = logits.index_select(0, places)  # [len(places), V]
        maximum = scaled.amax(1, keepdim=True).clamp_(min=_LEAST)  # [len(places), 1]
        scaled = scaled.sub_(maximum).div_(temperature.unsqueeze(1))
        weights = _exp_of_many_least(scaled) if is_suppressed else scaled.exp()
        truncate(scaled, weights, table.top_k[rows], table.top_p[rows], table.min_p[rows])
        return draw(weights, uniform)

    def _draw_by_kernel(
        self, logits: torch.Tensor, places: Int64Array, rows: Int64Array, positions: Int64Array
    ) -> torch.Tensor:
        """Do as `_draw` does, on a GPU: without sorting, and without waiting for the device."""
        table = self.table
        index, *given = upload(
            [
                places,
                np.maximum(table.temperature[rows], _MIN_TEMPERATURE),
                table.top_k[rows],
                table.top_p[rows],
                table.min_p[rows],
                table.seed[rows].view(np.int64),
                positions,
            ],
            self._device,
        )
        if len(rows) < len(logits):
            logits = logits.index_select(0, index)
        return ops.sample(logits.float(), *given)

    def _logprobs(
        self,
        raw_logprobs: torch.Tensor,
        token_ids: torch.Tensor,
        rows: Int64Array,
        places: Int64Array,
    ) -> SampledLogprobs:
        (index,) = upload([places], self._device)
        num_top = self.table.num_top_logprobs[rows[places]]
        chosen = raw_logprobs.gather(1, token_ids.index_select(0, index).unsqueeze(1)).squeeze(1)
        top = raw_logprobs.topk(min(int(num_top.max()), raw_logprobs.shape[1]), dim=1)
        return SampledLogprobs(places, num_top, chosen, top.indices, top.values)


def sample_others(
    forced: ForcedTokens,
    hidden: torch.Tensor,
    sample: Callable[[torch.Tensor, Int64Array], Sampled],
) -> Sampled:
    """Sample a step in which grammars force some tokens, which need no logits. CPU only.

    Args:
        forced: The forced tokens.
        hidden: Hidden states `[S, E]`. A sequence with a forced token has no logits that could be
            checked for non-finite values, so its hidden state is checked instead.
        sample: Samples the other sequences. The arguments are the hidden states of these sequences,
            and their indexes in `hidden` (int64).
    """
    has_choice = np.ones(len(hidden), np.bool_)
    has_choice[forced.places] = False
    (places,) = has_choice.nonzero()
    token_ids = np.empty(len(hidden), np.int64)
    token_ids[forced.places] = forced.token_ids
    is_finite = finite_rows(hidden.float())
    if not len(places):
        return Sampled(torch.from_numpy(token_ids), is_finite, None, NO_SEQUENCES)
    sampled = sample(hidden.index_select(0, torch.from_numpy(places)), places)
    token_ids[places] = sampled.token_ids.numpy()
    is_finite.numpy()[places] = sampled.is_finite.numpy()
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = replace(logprobs, places=places[logprobs.places])
    return Sampled(torch.from_numpy(token_ids), is_finite, logprobs, places[sampled.stuck])


def _exp_of_many_least(scaled: torch.Tensor) -> torch.Tensor:
    """Compute `scaled.exp()` for numbers up to 0, many of them -inf, twice as fast as torch.

    Weights below `_LEAST_WEIGHT` become 0. A token with such a weight could be drawn only with the
    random number 0: the weights add up to at least 1, and random numbers are multiples of 2^-53.
    """
    weights = torch.threshold(scaled, _LEAST_LOG, _LEAST_LOG).exp_()
    return torch.threshold_(weights, _LEAST_WEIGHT, 0.0)


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return bool[S]: whether all numbers of each row are finite."""
    # A non-finite number makes the sum non-finite; finite numbers below about 1e33 do not.
    if values.device.type == "cpu":  # torch's sum would wait for a thread that has lost its core
        with np.errstate(invalid="ignore", over="ignore"):
            return torch.from_numpy(np.isfinite(values.numpy().sum(axis=1)))
    return values.sum(1).isfinite()


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's first maximum, int64[S].

    On a CPU numpy takes a tenth of torch's time.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(1)

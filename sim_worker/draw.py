"""Draws tokens without a model: uniform draws that depend only on seed and position.

Symbols: `S` sequences.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_END_STREAM = np.uint64(0xD1B54A32D192ED03)
"""Makes the draw of an end token independent of the draw of other tokens."""

Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]


class TokenSource:
    """Draws tokens; end tokens come only as often as `mean_output_len` says."""

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], mean_output_len: float | None
    ) -> None:
        """Without `mean_output_len` or without end tokens, no sequence ends by itself."""
        self._plain = np.setdiff1d(np.arange(vocab_size), np.array(eos_token_ids, np.int64))
        self._eos_token_id = eos_token_ids[0] if eos_token_ids else None
        rate = 1 / mean_output_len if mean_output_len is not None else 0.0
        self._end_below = np.ldexp(rate, 64)

    def draw(
        self, seeds: Uint64Array, positions: Int64Array, may_end: npt.NDArray[np.bool_]
    ) -> Int64Array:
        """Draw a token for each sequence.

        Args:
            seeds: uint64[S], the request's seed plus the output's index.
            positions: int64[S], each token's index in its sequence, from 0.
            may_end: bool[S], whether the token may be an end token.

        Returns:
            int64[S]: token ids.
        """
        token_ids: Int64Array = self._plain[
            (splitmix(seeds, positions) % np.uint64(len(self._plain))).astype(np.int64)
        ]
        if self._end_below and self._eos_token_id is not None:
            chances = splitmix(seeds ^ _END_STREAM, positions)
            token_ids[may_end & (chances < self._end_below)] = self._eos_token_id
        return token_ids


class Script:
    """Returns given outputs token by token; a prompt with N end tokens gets output N, from 0 on.

    With a chat template that writes an end token after each tool result, the script plays the model
    of an agent.
    """

    def __init__(self, outputs: Sequence[Sequence[int]], eos_token_ids: Sequence[int]) -> None:
        """The first of `eos_token_ids` follows each output."""
        self._outputs = outputs
        self._eos_token_ids = eos_token_ids

    def token(self, prompt: npt.NDArray[np.int32], num_outputs: int) -> int:
        """Return the token with index `num_outputs` of the prompt's output.

        After the last output, the first output comes again.
        """
        number = np.isin(prompt, self._eos_token_ids).sum() % len(self._outputs)
        output = self._outputs[number]
        return output[num_outputs] if num_outputs < len(output) else self._eos_token_ids[0]


def splitmix(seeds: Uint64Array, positions: Int64Array) -> Uint64Array:
    """Return the (position + 1)-th output of the SplitMix64 generator that starts at each seed.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Uint64Array = x ^ (x >> np.uint64(31))
    return result

"""The expected result of a beam search, by searching the same tree with plain lists.

It implements the rules of `transformers` (`generate(num_beams=width)`) a second time:
sums are float32, and equal candidates keep their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from contract.sampling import EarlyStopping
from scheduler_svc.core.interface.events import Finished
from scheduler_svc.core.interface.request import BeamParams, FinishReason

VOCABULARY = (0, 1)


def logprobs(context: tuple[object, ...]) -> list[tuple[int, np.float32]]:
    """Return every token and how likely it is after `context`, likeliest first."""
    share = (crc32(repr(("likely", context)).encode()) % 997 + 1) / 999
    pairs = [(0, np.float32(np.log(1 - share))), (1, np.float32(np.log(share)))]
    return sorted(pairs, key=lambda pair: -pair[1])


@dataclass(frozen=True)
class Found:
    tokens: tuple[int, ...]
    total: np.float32
    score: np.float32
    by_end_token: bool


def expected_search(
    salt: str, prompt: Sequence[int], beam: BeamParams, max_tokens: int, min_tokens: int
) -> list[Found]:
    """Return all hypotheses, best first."""
    live: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0))]
    done: list[Found] = []
    for length in range(1, max_tokens + 1):
        grown = []
        for tokens, total in live:
            for token, logprob in logprobs((salt, *prompt, *tokens)):
                if token in beam.end_token_ids and length <= min_tokens:
                    continue
                grown.append(((*tokens, token), np.float32(total + logprob)))
        grown.sort(key=lambda pair: -pair[1])
        grown = grown[: beam.width * max(2, 1 + len(beam.end_token_ids))]
        live = []
        for place, (tokens, total) in enumerate(grown):
            by_end_token = tokens[-1] in beam.end_token_ids
            if not by_end_token and length < max_tokens:
                live.append((tokens, total))
            elif place < beam.width:
                score = total / np.float32(length**beam.length_penalty)
                done.append(Found(tokens, total, score, by_end_token))
        live = live[: beam.width]
        done = sorted(done, key=lambda found: -found.score)[: beam.width]
        if len(done) == beam.width and live:
            if beam.early_stopping is EarlyStopping.WHEN_FULL:
                break
            is_open = beam.early_stopping is EarlyStopping.NEVER and beam.length_penalty > 0
            hoped_for = max_tokens if is_open else length
            hope = live[0][1] / np.float32(hoped_for**beam.length_penalty)
            if hope <= done[-1].score:
                break
    return done


def judge_search(finished: Finished, found: Found | None) -> None:
    """Judge one output of a search; a vocabulary of two tokens may yield too few outputs."""
    if found is None:
        assert finished.reason is FinishReason.ERROR
        return
    assert finished.token_ids == found.tokens
    assert finished.cumulative_logprob == float(found.total)
    reason = FinishReason.STOP if found.by_end_token else FinishReason.LENGTH
    assert finished.reason is reason
    assert finished.stop_token_id == (found.tokens[-1] if found.by_end_token else None)

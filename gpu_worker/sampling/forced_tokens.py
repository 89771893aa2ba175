"""Samples a step of which grammars force some tokens: nobody needs logits for those. On a CPU.

Symbols: `S` sequences that sample, `E` hidden size.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.sampling.grammars import ForcedTokens
from gpu_worker.sampling.sampler import NOBODY, Sampled, finite_rows


def sample_others(
    forced: ForcedTokens,
    hidden: torch.Tensor,
    sample: Callable[[torch.Tensor, npt.NDArray[np.int64]], Sampled],
) -> Sampled:
    """What all sequences of a step sample.

    Args:
        forced: What some of them must.
        hidden: `[S, E]`, from which logits would be made; no row that is not finite has any.
        sample: Samples for the others, by their part of `hidden` and their places, int64[*].
    """
    has_choice = np.ones(len(hidden), np.bool_)
    has_choice[forced.places] = False
    (places,) = has_choice.nonzero()
    token_ids = np.empty(len(hidden), np.int64)
    token_ids[forced.places] = forced.token_ids
    is_finite = finite_rows(hidden.float())
    if not len(places):
        return Sampled(torch.from_numpy(token_ids), is_finite, None, NOBODY)
    sampled = sample(hidden.index_select(0, torch.from_numpy(places)), places)
    token_ids[places] = sampled.token_ids.numpy()
    is_finite.numpy()[places] = sampled.is_finite.numpy()
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = replace(logprobs, places=places[logprobs.places])
    return Sampled(torch.from_numpy(token_ids), is_finite, logprobs, places[sampled.stuck])

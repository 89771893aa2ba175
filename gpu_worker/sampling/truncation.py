"""Cuts unlikely tokens off each row's distribution: top_k, then top_p, then min_p.

The *candidates* are the largest logits of a row, among which the code looks for the cut.

Symbols: `S` sequences, `V` vocabulary, `C` candidates.
"""

import numpy as np
import numpy.typing as npt
import torch

from contract.arrays import Float32Array, Int64Array
from gpu_worker.memory.transfer import upload

_FEW = (64, 1024)
"""Numbers of candidates that a CPU tries first, because sorting a whole vocabulary takes
milliseconds per row."""


def truncate(
    logits: torch.Tensor,
    weights: torch.Tensor,
    top_k: Int64Array,
    top_p: npt.NDArray[np.float64],
    min_p: Float32Array,
) -> None:
    """Set the weight of each token that is cut off to 0, in place.

    Each cut works on the distribution that the previous cut left. Of equally likely tokens,
    those with lower ids stay. Rows do not affect each other.

    Args:
        logits: float32[S, V], divided by the temperature; each row's maximum is 0.
        weights: float32[S, V], `exp(logits)`; changed.
        top_k: int64[S] in [1, V].
        top_p: float64[S] in (0, 1].
        min_p: float32[S] in [0, 1].
    """
    (cut_rows,) = np.nonzero((top_p < 1) | (top_k < logits.shape[1]))
    if len(cut_rows):
        ks, ps = top_k[cut_rows], top_p[cut_rows]
        rows, k, p = upload([cut_rows, ks, ps], logits.device)
        cut_logits, cut_weights = logits.index_select(0, rows), weights.index_select(0, rows)
        threshold, count = _boundaries(cut_logits, cut_weights, k, p, int(ks.max()))
        cut_weights.masked_fill_(~_is_top(cut_logits, threshold, count), 0.0)
        weights.index_copy_(0, rows, cut_weights)
    if min_p.any():
        (floor,) = upload([min_p], logits.device)
        weights.masked_fill_(weights < floor.unsqueeze(1), 0.0)


def _boundaries(
    logits: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, p: torch.Tensor, max_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's smallest kept logit and its number of kept logits, `[S, 1]` each.

    A CPU looks at few candidates first, and at more only for rows that need more. A GPU looks at
    all candidates at once: it sorts fast, and to find out which rows need more, the host would have
    to wait for the GPU's results.
    """
    if logits.device.type != "cpu":
        return _boundaries_among(logits, weights, k, p, max_k)
    threshold = torch.empty(len(logits), 1)
    count = torch.empty(len(logits), 1, dtype=torch.int64)
    unsure = torch.arange(len(logits))
    for num_candidates in (*(few for few in _FEW if few < max_k), max_k):
        some_threshold, some_count = _boundaries_among(logits, weights, k, p, num_candidates)
        threshold[unsure], count[unsure] = some_threshold, some_count
        left = (some_count.squeeze(1) > num_candidates).nonzero().squeeze(1)
        unsure = unsure[left]
        if not len(unsure):
            break
        logits, weights, k, p = (part.index_select(0, left) for part in (logits, weights, k, p))
    return threshold, count


def _boundaries_among(
    logits: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `_boundaries` does, but look only at each row's `num_candidates` largest logits.

    A returned count above `num_candidates` means that the row needs more candidates.
    """
    num_tokens = logits.shape[1]
    if num_candidates < num_tokens:
        candidates = logits.topk(num_candidates, dim=1).values  # [S, C], descending
    else:
        candidates = _sorted(logits)
    sums = candidates.exp().cumsum(1, dtype=torch.float64)  # [S, C]
    k, p = k.unsqueeze(1), p.unsqueeze(1)  # [S, 1]
    total = torch.where(
        k < num_tokens,
        sums.gather(1, k.clamp(max=num_candidates) - 1),
        weights.sum(1, keepdim=True, dtype=torch.float64),
    )
    reaching_p = 1 + (sums < p * total).sum(1, keepdim=True)
    # Where k exceeds the number of candidates, `total` and `reaching_p` are wrong.
    count = torch.where((p < 1) & ((k <= num_candidates) | (k == num_tokens)), reaching_p, k)
    count = torch.minimum(count, k)
    return candidates.gather(1, count.clamp(max=num_candidates) - 1), count


def _sorted(logits: torch.Tensor) -> torch.Tensor:
    """Sort each row in descending order. On a CPU numpy takes a quarter of torch's time."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.neg().numpy(), axis=1)).neg_()
    return logits.sort(dim=1, descending=True).values


def _is_top(logits: torch.Tensor, threshold: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return bool[S, V]: which logits are each row's `count` largest; of equal ones, the first."""
    above, ties = logits > threshold, logits == threshold
    num_ties = count - above.sum(1, keepdim=True)
    # The running count is slow and rarely needed. On a CPU it is cheap to check beforehand.
    if logits.device.type == "cpu" and bool((ties.sum(1, keepdim=True) == num_ties).all()):
        return above | ties
    return above | (ties & (ties.cumsum(1) <= num_ties))

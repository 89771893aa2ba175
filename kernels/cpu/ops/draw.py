"""Draws from logits as they are, in C.

Symbols: `S` sequences, `N` of them that draw, `V` vocabulary.
"""

import torch

from kernels.checks import check_tensor
from kernels.cpu.library import native
from kernels.reference.draw import draw as twin


def draw(
    logits: torch.Tensor, places: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw a token for some rows of logits: int64[N].

    A token's weight is `exp((logit - max) / temperature)`. Drawn is the token at which the running
    sum of weights, in token order, first exceeds `uniform` of them all. Sums are float64 and each
    row's alone. One of weight 0 is drawn only from a row without a finite maximum: some id in
    range.

    Args:
        logits: float32[S, V]; left as they are.
        places: int64[N]: which rows.
        temperature: float32[N], above 0.
        uniform: float64[N] in [0, 1).

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_tensor("logits", logits, tuple(logits.shape[:2]), torch.float32, logits)
    num_draws = (len(places),)
    check_tensor("places", places, num_draws, torch.int64, logits)
    check_tensor("temperature", temperature, num_draws, torch.float32, logits)
    check_tensor("uniform", uniform, num_draws, torch.float64, logits)
    library = native()
    if library is None:
        return twin(logits, places, temperature, uniform)
    token_ids = torch.empty(num_draws, dtype=torch.int64)
    library.draw(
        len(places), logits.shape[1],
        logits.data_ptr(), places.data_ptr(), temperature.data_ptr(), uniform.data_ptr(),
        token_ids.data_ptr(), logits.stride(0),
    )  # fmt: skip
    return token_ids

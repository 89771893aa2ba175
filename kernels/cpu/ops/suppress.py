"""Suppression of what a bit mask does not admit, in C.

Symbols: `S` sequences, `G` of them that have a mask, `V` vocabulary, `W` words, V / 32 rounded up.
"""

import torch

from kernels import reference
from kernels.checks import check_suppression
from kernels.cpu.library import native


def suppress(logits: torch.Tensor, places: torch.Tensor, admitted: torch.Tensor) -> None:
    """Set each logit to -inf whose bit is 0, in place.

    Args:
        logits: float32[S, V].
        places: int64[G], each once: where among the logits the masks' rows are.
        admitted: int32[G, W]: bit t % 32 of word t // 32 is token t's.

    Raises:
        ValueError: shapes, dtypes, devices or strides do not fit.
    """
    check_suppression(logits, places, admitted)
    library = native()
    if library is None:
        reference.suppress(logits, places, admitted)
        return
    library.suppress(
        len(places), logits.shape[1],
        logits.data_ptr(), places.data_ptr(), admitted.data_ptr(),
        logits.stride(0), admitted.stride(0),
    )  # fmt: skip

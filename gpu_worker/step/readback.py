"""Brings what a step sampled back to the host, without waiting for it.

Symbols: `S` sequences that sample, `L` of them that want log-probabilities.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from contract.arrays import BoolArray, Int64Array
from contract.step import TokenLogprob
from gpu_worker.sampling.sampler import Sampled


@dataclass(frozen=True, slots=True, eq=False)
class HostSampled:
    """A step's sampled tokens, on the host."""

    token_ids: Int64Array
    """int64[S]."""
    is_finite: BoolArray
    """bool[S]: whether the logits were; if not, the token is none."""
    stuck: Int64Array
    """int64[*]: which of the S have a grammar that admits no token."""
    logprobs: tuple[TokenLogprob, ...]
    """Their `index` is a place in `token_ids`; ascending."""


NOTHING_SAMPLED = HostSampled(
    np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.int64), ()
)
"""Of a step in which no row samples."""


class Readback:
    """The copies of one step's results to the host; on CPU they are there at once."""

    def __init__(self, sampled: Sampled) -> None:
        """Start the copies, behind all work that was given to the device before."""
        self._sampled = sampled
        self._token_ids = to_host(sampled.token_ids)
        self._is_finite = to_host(sampled.is_finite)
        logprobs = sampled.logprobs
        self._logprobs = (
            ()
            if logprobs is None
            else tuple(
                to_host(part)
                for part in (logprobs.chosen, logprobs.top_token_ids, logprobs.top_logprobs)
            )
        )
        self._arrived: torch.cuda.Event | None = None
        if sampled.token_ids.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def token_ids(self) -> Int64Array:
        """int64[S]: the tokens alone, once they have arrived; any thread may call it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._token_ids.numpy()

    def wait(self) -> HostSampled:
        """The values, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return HostSampled(
            self._token_ids.numpy(),
            self._is_finite.numpy(),
            self._sampled.stuck,
            self._token_logprobs(),
        )

    def _token_logprobs(self) -> tuple[TokenLogprob, ...]:
        logprobs = self._sampled.logprobs
        if logprobs is None:
            return ()
        chosen, ids, values = (part.numpy() for part in self._logprobs)
        return tuple(
            _token_logprob(place, chosen[i], ids[i, :num_top], values[i, :num_top])
            for i, (place, num_top) in enumerate(
                zip(logprobs.places.tolist(), logprobs.num_top.tolist(), strict=True)
            )
        )


def _token_logprob(
    place: int, chosen: float, ids: Int64Array, values: npt.NDArray[np.float32]
) -> TokenLogprob:
    return TokenLogprob(place, float(chosen), ids.astype(np.int32), values)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to memory whose content is there when the stream has come so far."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)

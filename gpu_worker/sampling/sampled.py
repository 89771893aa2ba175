"""What a step sampled: on the device, and on its way to the host.

Symbols: `S` sequences that sample, `L` of them that want log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from contract.arrays import BoolArray, Int64Array
from contract.step import TokenLogprob
from gpu_worker.memory.transfer import to_host


@dataclass(frozen=True, slots=True, eq=False)
class SampledLogprobs:
    """Log-probabilities of the model's own distribution, before anything changed it."""

    places: npt.NDArray[np.int64]
    """int64[L]: which of the step's sequences, ascending; on the host."""
    num_top: npt.NDArray[np.int64]
    """int64[L]: how many likeliest tokens each asked for; on the host."""
    chosen: torch.Tensor
    """float32[L]: of the sampled tokens."""
    top_token_ids: torch.Tensor
    """int64[L, most of `num_top`], best first."""
    top_logprobs: torch.Tensor
    """float32, parallel to `top_token_ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What the sampler drew, on the device."""

    token_ids: torch.Tensor
    """int64[S]; where `is_finite` is false, any id in range."""
    is_finite: torch.Tensor
    """bool[S]: whether all logits of the sequence were finite."""
    logprobs: SampledLogprobs | None
    stuck: npt.NDArray[np.int64]
    """int64[*]: which of the sequences have a grammar that admits no token; on the host."""


def merged(parts: Sequence[Sampled]) -> Sampled:
    """What a step sampled, of what its parts did in order; at least one."""
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    return Sampled(
        token_ids=torch.cat([part.token_ids for part in parts]),
        is_finite=torch.cat([part.is_finite for part in parts]),
        logprobs=_merged_logprobs(parts, firsts),
        stuck=np.concatenate(
            [part.stuck + first for part, first in zip(parts, firsts, strict=False)]
        ),
    )


def _merged_logprobs(
    parts: Sequence[Sampled], firsts: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> SampledLogprobs | None:
    found = [
        (part.logprobs, first)
        for part, first in zip(parts, firsts, strict=False)
        if part.logprobs is not None
    ]
    if not found:
        return None
    width = max(logprobs.top_token_ids.shape[1] for logprobs, _ in found)

    def widened(tensor: torch.Tensor) -> torch.Tensor:  # nobody reads past `num_top`
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    return SampledLogprobs(
        places=np.concatenate([logprobs.places + first for logprobs, first in found]),
        num_top=np.concatenate([logprobs.num_top for logprobs, _ in found]),
        chosen=torch.cat([logprobs.chosen for logprobs, _ in found]),
        top_token_ids=torch.cat([widened(logprobs.top_token_ids) for logprobs, _ in found]),
        top_logprobs=torch.cat([widened(logprobs.top_logprobs) for logprobs, _ in found]),
    )


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

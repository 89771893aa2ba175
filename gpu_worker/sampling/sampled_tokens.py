"""The tokens that a step sampled, on the device and in transit to the host.

Symbols: `S` sequences that sample or pool, `L` of them that want log-probabilities, `P` of them
that pool, `D` numbers of a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from contract.arrays import BoolArray, Float32Array, Int64Array
from contract.pooling import Pooling
from contract.step import StepLogprob
from gpu_worker.memory.transfer import Download

_LEAST_NORM = 1e-12
"""The least norm to divide a vector by, as in torch's `normalize`: a vector of zeros stays zero."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledLogprobs:
    """Log-probabilities of the model's own distribution, before penalties, bias or grammars."""

    places: Int64Array
    """int64[L] on the host: each sequence's index among the S sequences, ascending."""
    num_top: Int64Array
    """int64[L] on the host: how many top tokens each sequence wants."""
    chosen: torch.Tensor
    """float32[L]: the log-probabilities of the sampled tokens."""
    top_token_ids: torch.Tensor
    """int64[L, max(num_top)], best first."""
    top_logprobs: torch.Tensor
    """float32, parallel to `top_token_ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """The vectors of sequences that pool."""

    places: Int64Array
    """int64[P] on the host: each sequence's index among the S sequences, ascending."""
    pooling: tuple[Pooling, ...]
    """The pooling of each sequence."""
    values: torch.Tensor
    """float32[P, D]: the vectors before they are shortened and normalized as `pooling` says."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The results of the sampler, on the device."""

    token_ids: torch.Tensor
    """int64[S]; any valid id where `is_finite` is false."""
    is_finite: torch.Tensor
    """bool[S]: whether all of the sequence's logits were finite."""
    logprobs: SampledLogprobs | None
    stuck: Int64Array
    """int64[*] on the host: indexes of the sequences whose grammar allows no token."""
    vectors: Vectors | None = None
    """The vectors of sequences that pool; the tokens of these sequences mean nothing."""


def merged(parts: Sequence[Sampled]) -> Sampled:
    """Join the samples of a step that was computed in parts, because memory was short.

    A step that was not split has one part.
    """
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
        vectors=_merged_vectors(parts, firsts),
    )


def _merged_vectors(
    parts: Sequence[Sampled], firsts: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> Vectors | None:
    found = [
        (part.vectors, first)
        for part, first in zip(parts, firsts, strict=False)
        if part.vectors is not None
    ]
    if not found:
        return None
    return Vectors(
        np.concatenate([vectors.places + first for vectors, first in found]),
        tuple(pooling for vectors, _ in found for pooling in vectors.pooling),
        torch.cat([vectors.values for vectors, _ in found]),
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

    def widened(tensor: torch.Tensor) -> torch.Tensor:  # columns past `num_top` are not read
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
    """The results of a step's sampling, on the host."""

    token_ids: Int64Array
    """int64[S]."""
    is_finite: BoolArray
    """bool[S]: whether all the sequence's logits were finite; if not, its token is meaningless."""
    stuck: Int64Array
    """int64[*]: indexes of the sequences whose grammar allows no token."""
    logprobs: tuple[StepLogprob, ...]
    """In ascending order of `StepLogprob.index`, which is an index in `token_ids`."""
    vectors: tuple[tuple[int, bytes], ...]
    """For each vector: its sequence's index in `token_ids`, and its numbers, as little-endian
    float32."""


NOTHING_SAMPLED = HostSampled(
    np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.int64), (), ()
)
"""The result of a step in which no row samples."""


class Readback:
    """A step's sampled tokens, while they are copied to the host."""

    def __init__(self, sampled: Sampled) -> None:
        """Start the copies; the device begins them after its earlier work."""
        self._sampled = sampled
        tensors = [sampled.token_ids, sampled.is_finite]
        if (logprobs := sampled.logprobs) is not None:
            tensors += [logprobs.chosen, logprobs.top_token_ids, logprobs.top_logprobs]
        if sampled.vectors is not None:
            tensors.append(sampled.vectors.values)
        self._download = Download(*tensors)
        self.is_done = self._download.is_done

    def token_ids(self) -> Int64Array:
        """Wait for the tokens, int64[S]; any thread may call this."""
        return self._download.wait()[0]

    def wait(self) -> HostSampled:
        """Wait for all values and return them."""
        token_ids, is_finite, *others = self._download.wait()
        logprobs: tuple[StepLogprob, ...] = ()
        vectors: tuple[tuple[int, bytes], ...] = ()
        if self._sampled.vectors is not None:
            vectors = _host_vectors(self._sampled.vectors, others.pop())
        if self._sampled.logprobs is not None:
            logprobs = _token_logprobs(self._sampled.logprobs, *others)
        return HostSampled(token_ids, is_finite, self._sampled.stuck, logprobs, vectors)


def _host_vectors(
    vectors: Vectors,
    values: Float32Array,  # [P, D]
) -> tuple[tuple[int, bytes], ...]:
    """Shorten and normalize each vector as its pooling says."""
    made = []
    for place, pooling, vector in zip(
        vectors.places.tolist(), vectors.pooling, values, strict=True
    ):
        cut = vector[: pooling.dimensions]
        if pooling.normalize:
            cut = cut / max(float(np.linalg.norm(cut)), _LEAST_NORM)
        made.append((place, cut.astype("<f4").tobytes()))
    return tuple(made)


def _token_logprobs(
    logprobs: SampledLogprobs,
    chosen: Float32Array,  # [L]
    top_token_ids: Int64Array,  # [L, most of num_top]
    top_logprobs: Float32Array,  # [L, most of num_top]
) -> tuple[StepLogprob, ...]:
    return tuple(
        StepLogprob(
            place,
            float(chosen[i]),
            top_token_ids[i, :num_top].astype(np.int32),
            top_logprobs[i, :num_top],
        )
        for i, (place, num_top) in enumerate(
            zip(logprobs.places.tolist(), logprobs.num_top.tolist(), strict=True)
        )
    )

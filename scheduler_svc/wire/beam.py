"""A beam search: as a router asks for it, as a worker is told, and the candidates it reports."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from math import isfinite

import numpy as np

from contract.arrays import ints
from contract.errors import InvalidArgumentError
from contract.info import ModelInfo
from contract.step import Result
from quire.v1 import common_pb2, scheduler_pb2, worker_pb2
from scheduler_svc.core.beams.search import BeamParams, EarlyStopping

_MIN_WIDTH, _MAX_WIDTH = 2, 10
"""As in `quire.v1.BeamSearch`, as the next."""
_MAX_LENGTH_PENALTY = 5
_NO_LOGPROB = common_pb2.TokenLogprob()

_EARLY_STOPPING_FROM_PROTO = {
    common_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    common_pb2.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    common_pb2.EARLY_STOPPING_WHEN_FULL: EarlyStopping.WHEN_FULL,
    common_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def beam_from_proto(message: scheduler_pb2.Submit, model: ModelInfo) -> BeamParams:
    """Take the search that a request asks for.

    Raises:
        InvalidArgumentError: A field breaks the contract; the message names value and limit.
    """
    beam, sampling = message.beam, message.sampling
    if not _MIN_WIDTH <= beam.width <= _MAX_WIDTH:
        raise InvalidArgumentError(
            "beam.width", f"is {beam.width}; it must be in [{_MIN_WIDTH}, {_MAX_WIDTH}]"
        )
    if message.n > beam.width:
        raise InvalidArgumentError(
            "n", f"is {message.n}; it must be at most beam.width, which is {beam.width}"
        )
    length_penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    if not (isfinite(length_penalty) and abs(length_penalty) <= _MAX_LENGTH_PENALTY):
        raise InvalidArgumentError(
            "beam.length_penalty",
            f"is {length_penalty}; it must be in [-{_MAX_LENGTH_PENALTY}, {_MAX_LENGTH_PENALTY}]",
        )
    if beam.early_stopping not in _EARLY_STOPPING_FROM_PROTO:
        raise InvalidArgumentError(
            "beam.early_stopping", f"is {beam.early_stopping}, which this scheduler does not know"
        )
    if any(output.finished or output.token_ids for output in message.outputs):
        raise InvalidArgumentError(
            "outputs", "has tokens or an end; a beam search has neither before it is over"
        )
    ends = () if sampling.ignore_eos else model.eos_token_ids
    params = BeamParams(
        width=beam.width,
        end_token_ids=tuple(sorted({*ends, *sampling.stop_token_ids})),
        length_penalty=length_penalty,
        early_stopping=_EARLY_STOPPING_FROM_PROTO[beam.early_stopping],
    )
    if params.num_kept > model.vocab_size:
        raise InvalidArgumentError(
            "beam.width",
            f"is {beam.width}: with {len(params.end_token_ids)} tokens that end an output, the"
            f" search looks at {params.num_kept} at once; the model has {model.vocab_size}",
        )
    return params


def beam_sampling(
    params: BeamParams, sampling: common_pb2.SamplingParams
) -> common_pb2.SamplingParams:
    """Make what a worker is told: to report candidates, and to end nothing by itself."""
    num_ruled_out = len(params.end_token_ids) if sampling.min_tokens else 0
    return common_pb2.SamplingParams(
        temperature=0,
        seed=sampling.seed,
        ignore_eos=True,
        logprobs=params.num_kept + num_ruled_out,
        adapter=sampling.adapter if sampling.HasField("adapter") else None,
    )


def with_candidates(
    result: Result, logprobs: Iterable[worker_pb2.SampledLogprob], beam_rows: Collection[int]
) -> Result:
    """Return the result with the likeliest tokens of the rows that are beams, if there are any.

    A beam that sampled and has no log-probabilities has no candidates.
    """
    if not beam_rows:
        return result
    index_to_logprob = {item.index: item.logprob for item in logprobs}
    candidates = [
        (row, index_to_logprob.get(index, _NO_LOGPROB))
        for index, row in enumerate(result.sampled_rows.tolist())
        if row in beam_rows
    ]
    tops = [logprob for _, logprob in candidates]
    return replace(
        result,
        candidate_rows=ints([row for row, _ in candidates]),
        candidate_counts=ints([len(top.top_token_ids) for top in tops]),
        candidate_token_ids=ints([id_ for top in tops for id_ in top.top_token_ids]),
        candidate_logprobs=np.array([p for top in tops for p in top.top_logprobs], np.float32),
    )

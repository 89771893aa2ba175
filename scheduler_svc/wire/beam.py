"""Converts the data of beam searches between protobuf and the core.

The data are a search's parameters from a router, the sampling parameters for a worker, and the
candidates in a worker's result. A candidate is a token that may continue a beam, with its
log-probability.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from contract.arrays import ints
from contract.codec.sampling import beam_from_proto
from contract.errors import InvalidArgumentError
from contract.info import ModelInfo
from contract.sampling import EarlyStopping
from contract.step import Result
from quire.v1 import common_pb2, scheduler_pb2, worker_pb2
from scheduler_svc.core.interface.request import BeamParams

_NO_LOGPROB = common_pb2.TokenLogprob()


def beam_params_from_proto(message: scheduler_pb2.Submit, model: ModelInfo) -> BeamParams:
    """Parse the beam search parameters of a request.

    Raises:
        InvalidArgumentError: A field is invalid; the message names the value and the limit.
    """
    beam, sampling = beam_from_proto(message.beam), message.sampling
    beam.check(message.n)
    if any(output.finished or output.token_ids for output in message.outputs):
        raise InvalidArgumentError(
            "outputs", "has tokens or an end; a beam search has neither before it ends"
        )
    ends = () if sampling.ignore_eos else model.eos_token_ids
    params = BeamParams(
        width=beam.width,
        end_token_ids=tuple(sorted({*ends, *sampling.stop_token_ids})),
        length_penalty=beam.length_penalty,
        early_stopping=EarlyStopping.of(beam.early_stopping),
    )
    if params.num_kept > model.vocab_size:
        raise InvalidArgumentError(
            "beam.width",
            f"is {beam.width}; with {len(params.end_token_ids)} tokens that end an output, the"
            f" search needs {params.num_kept} tokens at once; the model has {model.vocab_size}",
        )
    return params


def beam_sampling(
    params: BeamParams, sampling: common_pb2.SamplingParams
) -> common_pb2.SamplingParams:
    """Make parameters with which a worker only reports candidates, and ends no sequence."""
    num_excluded = len(params.end_token_ids) if sampling.min_tokens else 0
    return common_pb2.SamplingParams(
        temperature=0,
        seed=sampling.seed,
        ignore_eos=True,
        logprobs=params.num_kept + num_excluded,
        adapter=sampling.adapter if sampling.HasField("adapter") else None,
    )


def with_candidates(
    result: Result, logprobs: Iterable[worker_pb2.SampledLogprob], beam_rows: Collection[int]
) -> Result:
    """Return `result` with candidates, taken from `logprobs`, for the beams in `beam_rows`.

    A beam that sampled without log-probabilities gets no candidates.
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

"""A beam search as a router asks for it, and as a worker is told and keeps it."""

from math import isnan

import numpy as np
from google.protobuf.message import DecodeError

from contract.codec.sampling import beam_from_proto
from contract.errors import InvalidArgumentError
from contract.packing import pack_int32, unpack_int32
from contract.sampling import MAX_BEAM_WIDTH, EarlyStopping
from quire.v1 import common_pb2, scheduler_pb2, worker_pb2
from scheduler_svc.core.beams.search import BeamParams, OutputState, SearchState
from scheduler_svc.domain import ModelInfo
from scheduler_svc.wire.checks import check_at_most, check_below


def beam_params_from_proto(message: scheduler_pb2.Submit, model: ModelInfo) -> BeamParams:
    """Take the search that a request asks for.

    Raises:
        InvalidArgumentError: A field breaks the contract; the message names value and limit.
    """
    beam, sampling = beam_from_proto(message.beam), message.sampling
    beam.check(message.n)
    if any(output.finished or output.token_ids for output in message.outputs):
        raise InvalidArgumentError(
            "outputs", "has tokens or an end; a beam search has neither before it is over"
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


def search_to_note(state: SearchState) -> bytes:
    """Make what a worker keeps of a search for a later scheduler."""
    note = worker_pb2.SearchNote(
        beams=map(_output_to_proto, state.beams),
        hypotheses=map(_output_to_proto, state.hypotheses),
    )
    return note.SerializeToString()


def search_from_note(note: bytes) -> SearchState | None:
    """Take what a worker has kept; None: it was no search.

    Raises:
        InvalidArgumentError: It is not what a scheduler has written.
    """
    if not note:
        return None
    try:
        message = worker_pb2.SearchNote.FromString(note)
    except DecodeError:
        raise InvalidArgumentError("rows.note", "is no SearchNote") from None
    return SearchState(
        tuple(map(_output_from_proto, message.beams)),
        tuple(map(_output_from_proto, message.hypotheses)),
    )


def check_search(state: SearchState, num_row_tokens: int, model: ModelInfo) -> None:
    """Check that a worker can have been left this note with a row of so many tokens.

    Raises:
        InvalidArgumentError: No search is of this size, or the model lacks a token of it.
    """
    check_at_most("rows.note.beams", len(state.beams), MAX_BEAM_WIDTH)
    check_at_most("rows.note.hypotheses", len(state.hypotheses), MAX_BEAM_WIDTH)
    for output in (*state.beams, *state.hypotheses):
        num_shared, token_ids = output.num_shared_tokens, output.token_ids
        check_at_most("rows.note.num_shared_tokens", num_shared, num_row_tokens)
        check_at_most("rows.note.token_ids", num_shared + len(token_ids), model.max_model_len)
        check_below(token_ids, "rows.note.token_ids", model.vocab_size, "vocab_size")


def _output_to_proto(output: OutputState) -> worker_pb2.NotedOutput:
    return worker_pb2.NotedOutput(
        num_shared_tokens=output.num_shared_tokens,
        token_ids=pack_int32(output.token_ids),
        logprob=float(output.logprob),
    )


def _output_from_proto(message: worker_pb2.NotedOutput) -> OutputState:
    if isnan(message.logprob):
        raise InvalidArgumentError("rows.note.logprob", "is nan; it must be a number")
    token_ids = unpack_int32(message.token_ids, "rows.note.token_ids")
    return OutputState(message.num_shared_tokens, token_ids, np.float32(message.logprob))

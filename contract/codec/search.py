"""Converts the state of a beam search to the `SearchNote` that a worker keeps, and back."""

from math import isnan

import numpy as np
from google.protobuf.message import DecodeError

from contract.codec.message_checks import check_at_most, check_values
from contract.codec.packing import pack_int32, unpack_int32
from contract.errors import InvalidArgumentError
from contract.sampling import MAX_BEAM_WIDTH
from contract.step import OutputState, SearchState
from quire.v1 import worker_pb2


def search_to_note(state: SearchState) -> bytes:
    """Serialize the state of a search; the worker keeps the bytes for a later scheduler."""
    note = worker_pb2.SearchNote(
        beams=map(_output_to_proto, state.beams),
        hypotheses=map(_output_to_proto, state.hypotheses),
    )
    return note.SerializeToString()


def search_from_note(note: bytes) -> SearchState | None:
    """Parse a note that a worker has kept; return None for an empty note: there is no beam search.

    Raises:
        InvalidArgumentError: The note is malformed.
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


def check_search(
    state: SearchState, num_row_tokens: int, max_model_len: int, vocab_size: int
) -> None:
    """Check the state of a beam search; the row of its best beam has `num_row_tokens` tokens.

    Raises:
        InvalidArgumentError: The search has too many outputs or tokens, or an unknown token id.
    """
    check_at_most("rows.note.beams", len(state.beams), MAX_BEAM_WIDTH)
    check_at_most("rows.note.hypotheses", len(state.hypotheses), MAX_BEAM_WIDTH)
    for output in (*state.beams, *state.hypotheses):
        num_shared, token_ids = output.num_shared_tokens, output.token_ids
        check_at_most("rows.note.num_shared_tokens", num_shared, num_row_tokens)
        check_at_most("rows.note.token_ids", num_shared + len(token_ids), max_model_len)
        check_values("rows.note.token_ids", token_ids, 0, vocab_size - 1)


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

"""Converts the messages on the stream with a scheduler to values and back."""

from array import array
from typing import Final

import grpc
from google.protobuf.message import DecodeError

from contract.codec.info import model_info_from_proto
from contract.codec.outputs import (
    FINISH_REASON_TO_PROTO,
    error_to_proto,
    finish_reason_from_proto,
    logprob_from_proto,
)
from contract.codec.packing import pack_int32, unpack_int32, unpack_uint64
from contract.codec.request import stop_options_from_bytes, stop_options_to_bytes
from contract.codec.sampling import (
    adapter_from_proto,
    beam_from_proto,
    beam_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from contract.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    TooBusyError,
    UnavailableError,
    UnimplementedError,
)
from contract.outputs import FinishReason, OutputError, OutputFinished
from contract.request import MAX_N, GenerateRequest
from quire.v1 import scheduler_pb2
from router.live.live_request import LiveRequest, ReplayRecord
from router.schedulers.messages import (
    Admitted,
    Ending,
    Pin,
    PromptPart,
    QueueRoom,
    Refusal,
    Resumption,
    SchedulerMessage,
    StepEvents,
    Welcome,
)

_MAX_RETRY_AFTER_S: Final = 3600

_CODE_TO_ERROR: Final[dict[int, type[QuireError]]] = {
    error.code.value[0]: error
    for error in (
        AbortedError,
        AlreadyExistsError,
        DeadlineExceededError,
        NotFoundError,
        UnavailableError,
        UnimplementedError,
    )
}


def submit_to_proto(live: LiveRequest, now: float) -> scheduler_pb2.ConnectRequest:
    """Make the message that submits a request with its outputs so far.

    `now` is the time of the event loop's clock. The message says how much time is left until the
    request's deadline.
    """
    record = live.record
    so_far = [
        scheduler_pb2.OutputSoFar(
            token_ids=pack_int32(output.token_ids),
            finished=output.finished is not None,
            end=_end_to_proto(output.finished) if record.resume_record is not None else None,
        )
        for output in live.outputs
    ]
    is_new = not any(output.token_ids or output.finished for output in so_far)
    return scheduler_pb2.ConnectRequest(
        submit=scheduler_pb2.Submit(
            request_id=record.request_id,
            first_seq_key=record.first_seq_key,
            n=len(live.outputs),
            prompt_token_ids=pack_int32(record.prompt_token_ids),
            sampling=sampling_to_proto(record.sampling),
            cache_salt=record.cache_salt,
            cache_pin_s=record.cache_pin_s,
            traceparent=record.traceparent,
            outputs=[] if is_new else so_far,
            priority=record.priority,
            tenant=record.tenant,
            deadline_s=None if record.deadline is None else max(0.0, record.deadline - now),
            beam=None if record.beam is None else beam_to_proto(record.beam),
            resume_record=record.resume_record,
            is_again=live.num_submits > 1,
        )
    )


def record_to_bytes(live: LiveRequest, request: GenerateRequest) -> bytes:
    """Serialize a request without its outputs, for another process to submit."""
    message = submit_to_proto(live, 0.0).submit
    message.ClearField("outputs")
    message.resume_record = stop_options_to_bytes(request)
    return message.SerializeToString()


def record_from_bytes(record: bytes) -> Resumption:
    """Parse what `record_to_bytes` has made; may raise InvalidArgumentError."""
    try:
        submit = scheduler_pb2.Submit.FromString(record)
    except DecodeError as error:
        raise InvalidArgumentError("record", f"cannot be parsed: {error}") from error
    return _resumption_from_proto(scheduler_pb2.Resumed(submit=submit))


def _resumption_from_proto(message: scheduler_pb2.Resumed) -> Resumption:
    submit = message.submit
    if not 1 <= submit.n <= MAX_N:
        raise InvalidArgumentError("resumed.submit.n", f"is {submit.n}; it must be in [1, {MAX_N}]")
    try:
        stop_options = stop_options_from_bytes(submit.resume_record)
    except DecodeError as error:
        raise InvalidArgumentError("resume_record", f"cannot be parsed: {error}") from error
    return Resumption(
        record=ReplayRecord(
            request_id=submit.request_id,
            first_seq_key=submit.first_seq_key,
            prompt_token_ids=array("i", unpack_int32(submit.prompt_token_ids, "prompt_token_ids")),
            sampling=sampling_from_proto(submit.sampling),
            cache_salt=submit.cache_salt,
            cache_pin_s=submit.cache_pin_s if submit.HasField("cache_pin_s") else None,
            traceparent=submit.traceparent,
            priority=submit.priority,
            tenant=submit.tenant,
            deadline=None,
            beam=beam_from_proto(submit.beam) if submit.HasField("beam") else None,
            resume_record=submit.resume_record,
        ),
        stop_options=stop_options,
        n=submit.n,
        so_far=_step_from_proto(message.so_far),
    )


def _end_to_proto(finished: OutputFinished | None) -> scheduler_pb2.SequenceFinished | None:
    if finished is None:
        return None
    return scheduler_pb2.SequenceFinished(
        finish_reason=FINISH_REASON_TO_PROTO[finished.finish_reason],
        stop_token_id=finished.stop_token_id,
        error=None if finished.error is None else error_to_proto(finished.error),
        cumulative_logprob=finished.cumulative_logprob,
    )


def message_from_proto(message: scheduler_pb2.ConnectResponse) -> SchedulerMessage:
    """Parse a message; raises InvalidArgumentError if it breaks the protocol."""
    match message.WhichOneof("message"):
        case "step":
            return _step_from_proto(message.step)
        case "refused":
            return _refusal_from_proto(message.refused)
        case "resumed":
            return _resumption_from_proto(message.resumed)
        case "welcome":
            return Welcome(
                epoch=message.welcome.epoch,
                resume_grace_s=message.welcome.resume_grace_s,
                superseded_epochs=frozenset(message.welcome.superseded_epochs),
                max_waiting=message.welcome.max_waiting or None,
                wants_heartbeats=message.welcome.wants_heartbeats,
                model=model_info_from_proto(message.welcome.model, "welcome.model"),
            )
        case _:
            raise InvalidArgumentError("message", "is not set, or unknown to this router's version")


def _step_from_proto(message: scheduler_pb2.StepOutput) -> StepEvents:
    # Python ints are faster here, because each number is used once, as a key or in an `array`.
    seq_keys = unpack_uint64(message.seq_keys, "step.seq_keys").tolist()
    token_ids = unpack_int32(message.token_ids, "step.token_ids").tolist()
    if token_ids and (least := min(token_ids)) < 0:
        raise InvalidArgumentError("step.token_ids", f"has {least}; ids must be at least 0")
    if len(seq_keys) != len(token_ids):
        raise InvalidArgumentError(
            "step.token_ids", f"has {len(token_ids)} entries; it must have {len(seq_keys)}"
        )
    return StepEvents(
        seq_keys=seq_keys,
        token_ids=token_ids,
        logprobs={entry.index: logprob_from_proto(entry.logprob) for entry in message.logprobs},
        prompt_scores=tuple(
            PromptPart(part.seq_key, part.position, tuple(map(logprob_from_proto, part.logprobs)))
            for part in message.prompt_logprobs
        ),
        admissions=tuple(
            Admitted(admitted.seq_key, admitted.num_cached_tokens) for admitted in message.admitted
        ),
        pins=tuple(Pin(pinned.seq_key, pinned.num_pinned_tokens) for pinned in message.pinned),
        vectors={each.seq_key: each.vector for each in message.pooled},
        endings=tuple(map(_ending_from_proto, message.finished)),
        room=_room_from_proto(message.room) if message.HasField("room") else None,
        max_model_len=message.max_model_len if message.HasField("max_model_len") else None,
        is_unloaded=message.is_unloaded if message.HasField("is_unloaded") else None,
        adapters=(
            tuple(map(adapter_from_proto, message.adapters.adapters))
            if message.HasField("adapters")
            else None
        ),
    )


def _room_from_proto(message: scheduler_pb2.QueueRoom) -> QueueRoom:
    return QueueRoom(message.num_sequences if message.HasField("num_sequences") else None)


def _ending_from_proto(message: scheduler_pb2.SequenceFinished) -> Ending:
    reason = finish_reason_from_proto(message.finish_reason)
    error: OutputError | None = None
    if reason is FinishReason.ERROR:
        error = OutputError(
            code=message.error.code or grpc.StatusCode.INTERNAL.value[0],
            message=message.error.message or "the scheduler ended the sequence without a reason",
            retryable=message.error.retryable,
        )
    return Ending(
        seq_key=message.seq_key,
        reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        error=error,
        cumulative_logprob=(
            message.cumulative_logprob if message.HasField("cumulative_logprob") else None
        ),
    )


def _refusal_from_proto(message: scheduler_pb2.Refused) -> Refusal:
    retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else 1.0
    if not 0 <= retry_after_s <= _MAX_RETRY_AFTER_S:  # false for NaN
        raise InvalidArgumentError(
            "refused.retry_after_s",
            f"is {retry_after_s}; it must be in [0, {_MAX_RETRY_AFTER_S}]",
        )
    error = error_from_code(message.code, message.message, retry_after_s)
    return Refusal(message.first_seq_key, error, retry_after_s)


def error_from_code(code: int, message: str, retry_after_s: float = 1.0) -> QuireError:
    """Make the error for a `google.rpc.Code` and a message."""
    if code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
        # The message names the field first; see `InvalidArgumentError`.
        field, _, problem = message.partition(" ")
        return InvalidArgumentError(field, problem)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
        return TooBusyError(message, retry_after_s)
    return _CODE_TO_ERROR.get(code, QuireError)(message)


def failure_of(finished: OutputFinished) -> QuireError | None:
    """Return the error of an output that has failed; None if it has succeeded."""
    match finished.finish_reason:
        case FinishReason.ERROR:
            assert finished.error is not None, "ERROR comes with an error"
            return error_from_code(finished.error.code, finished.error.message)
        case FinishReason.DEADLINE:
            return DeadlineExceededError("the deadline passed before the outputs were complete")
        case FinishReason.CANCELLED:
            return UnavailableError("the service cancelled the request")
        case _:
            return None

"""Converts the events of a request's stream to protobuf and back."""

from typing import Final

from contract.errors import InvalidArgumentError
from contract.outputs import (
    Event,
    FinishReason,
    OutputDelta,
    OutputError,
    OutputFinished,
    PromptScores,
    TokenLogprob,
    Usage,
)
from quire.v1 import common_pb2, inference_pb2

FINISH_REASON_TO_PROTO: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_REASON_FROM_PROTO: Final = {proto: r for r, proto in FINISH_REASON_TO_PROTO.items()}


def finish_reason_from_proto(reason: int) -> FinishReason:
    """Convert a finish reason; a number that this version of Quire does not know becomes ERROR."""
    return _FINISH_REASON_FROM_PROTO.get(reason, FinishReason.ERROR)  # type: ignore[call-overload,no-any-return]


def event_from_proto(response: inference_pb2.GenerateResponse) -> Event:
    """Convert an event; raises ValueError for a kind of event that this version does not know."""
    match response.WhichOneof("event"):
        case "delta":
            delta = response.delta
            return OutputDelta(
                output_index=delta.output_index,
                token_offset=delta.token_offset,
                token_ids=tuple(delta.token_ids),
                text=delta.text,
                logprobs=tuple(map(logprob_from_proto, delta.logprobs)),
            )
        case "finished":
            return finished_from_proto(response.finished)
        case "usage":
            return usage_from_proto(response.usage)
        case "prompt":
            return prompt_scores_from_proto(response.prompt)
        case kind:
            raise ValueError(f"event is {kind}; this client knows prompt, delta, finished, usage")


def event_to_proto(request_id: str, event: Event) -> inference_pb2.GenerateResponse:
    match event:
        case OutputDelta():
            response = inference_pb2.GenerateResponse(request_id=request_id)
            write_delta(event, response.delta)
            return response
        case OutputFinished():
            return inference_pb2.GenerateResponse(
                request_id=request_id, finished=finished_to_proto(event)
            )
        case Usage():
            return inference_pb2.GenerateResponse(
                request_id=request_id, usage=usage_to_proto(event)
            )
        case PromptScores():
            return inference_pb2.GenerateResponse(
                request_id=request_id, prompt=prompt_scores_to_proto(event)
            )


def write_delta(delta: OutputDelta, message: inference_pb2.OutputDelta) -> None:
    """Write a delta into an empty message.

    The caller can clear one message and use it again for each delta. To make a new message for each
    delta would take three times as long.
    """
    message.output_index = delta.output_index
    message.token_offset = delta.token_offset
    message.token_ids.extend(delta.token_ids)
    message.text = delta.text
    if delta.logprobs:
        message.logprobs.extend(map(logprob_to_proto, delta.logprobs))


def finished_from_proto(message: inference_pb2.OutputFinished) -> OutputFinished:
    stopped_by = message.WhichOneof("stopped_by")
    return OutputFinished(
        output_index=message.output_index,
        finish_reason=finish_reason_from_proto(message.finish_reason),
        stop_string=message.stop_string if stopped_by == "stop_string" else None,
        stop_token_id=message.stop_token_id if stopped_by == "stop_token_id" else None,
        error=error_from_proto(message.error) if message.HasField("error") else None,
        cumulative_logprob=(
            message.cumulative_logprob if message.HasField("cumulative_logprob") else None
        ),
    )


def finished_to_proto(finished: OutputFinished) -> inference_pb2.OutputFinished:
    error = finished.error
    return inference_pb2.OutputFinished(
        output_index=finished.output_index,
        finish_reason=FINISH_REASON_TO_PROTO[finished.finish_reason],
        stop_string=finished.stop_string,
        stop_token_id=finished.stop_token_id,
        error=None if error is None else error_to_proto(error),
        cumulative_logprob=finished.cumulative_logprob,
    )


def error_from_proto(message: common_pb2.OutputError) -> OutputError:
    return OutputError(message.code, message.message, message.retryable)


def error_to_proto(error: OutputError) -> common_pb2.OutputError:
    return common_pb2.OutputError(code=error.code, message=error.message, retryable=error.retryable)


def usage_from_proto(message: inference_pb2.Usage) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.pinned_tokens,
        message.reasoning_tokens,
    )


def usage_to_proto(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        pinned_tokens=usage.pinned_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def prompt_scores_from_proto(message: inference_pb2.PromptScores) -> PromptScores:
    return PromptScores(tuple(map(logprob_from_proto, message.logprobs)), message.has_more)


def prompt_scores_to_proto(scores: PromptScores) -> inference_pb2.PromptScores:
    return inference_pb2.PromptScores(
        logprobs=map(logprob_to_proto, scores.logprobs), has_more=scores.has_more
    )


def logprob_from_proto(message: common_pb2.TokenLogprob) -> TokenLogprob:
    """Convert a log-probability.

    Raises:
        InvalidArgumentError: `top_token_ids` and `top_logprobs` differ in length.
    """
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InvalidArgumentError(
            "logprob.top_logprobs",
            f"has {len(message.top_logprobs)} entries; it must have {len(message.top_token_ids)}",
        )
    return TokenLogprob(
        message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )


def logprob_to_proto(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob,
        top_token_ids=[token_id for token_id, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )

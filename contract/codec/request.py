"""Converts clients' requests to protobuf and back.

Deadline, priority and tenant travel in the metadata of the gRPC call, not in the message. The
message also lacks the fields that only the router uses, such as `add_special_tokens`.
"""

from contract.codec.fields import Converters, changed_fields, set_fields
from contract.codec.info import abilities_from_proto, abilities_to_proto
from contract.codec.sampling import (
    beam_from_proto,
    beam_to_proto,
    pooling_kind_from_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from contract.errors import InvalidArgumentError
from contract.pooling import PoolingKind
from contract.request import (
    GenerateRequest,
    Model,
    OutputReceived,
    ResumeRequest,
    StopOptions,
    ThinkingMarkers,
)
from quire.v1 import common_pb2, inference_pb2, scheduler_pb2

_FROM_PROTO: Converters = {
    "text": str,
    "token_ids": lambda token_ids: tuple(token_ids.ids),
    "sampling": sampling_from_proto,
    "stop": tuple,
    "bad_words": tuple,
    "beam": beam_from_proto,
}
_TO_PROTO: Converters = {"sampling": sampling_to_proto, "beam": beam_to_proto}


def generate_request_from_proto(message: inference_pb2.GenerateRequest) -> GenerateRequest:
    """Convert a request.

    Raises:
        InvalidArgumentError: The request has no prompt; has an unknown enum value; has a
            `sampling.structured` without a form; or sets `sampling.adapter` or `sampling.pooling`.
    """
    if message.sampling.HasField("adapter"):
        raise InvalidArgumentError("sampling.adapter", "is set; name the adapter in model")
    if message.sampling.HasField("pooling"):
        raise InvalidArgumentError("sampling.pooling", "is set; call Embed")
    if message.WhichOneof("prompt") is None:
        raise InvalidArgumentError("prompt", "is not set; text or token_ids must be")
    given = set_fields(message, _FROM_PROTO)
    prompt = given.pop("text", None)
    return GenerateRequest(prompt=given.pop("token_ids", ()) if prompt is None else prompt, **given)


def generate_request_to_proto(request: GenerateRequest) -> inference_pb2.GenerateRequest:
    """Convert a request; raises ValueError if it sets a field that the message does not have."""
    given = changed_fields(request, _TO_PROTO)
    prompt = given.pop("prompt")
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(text=prompt, **given)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), **given)


def embed_requests_from_proto(message: inference_pb2.EmbedRequest) -> list[GenerateRequest]:
    """Make one request for each of the message's inputs, with the default `sampling`.

    Raises:
        InvalidArgumentError: An input has neither text nor token ids.
    """
    truncate = message.truncate_prompt_tokens
    requests = []
    for i, each in enumerate(message.inputs):
        if each.WhichOneof("input") is None:
            raise InvalidArgumentError(f"inputs[{i}]", "is not set; text or token_ids must be")
        requests.append(
            GenerateRequest(
                prompt=each.text if each.HasField("text") else tuple(each.token_ids.ids),
                model=message.model,
                request_id=message.request_id and f"{message.request_id}-{i}",
                truncate_prompt_tokens=(
                    truncate if message.HasField("truncate_prompt_tokens") else None
                ),
            )
        )
    return requests


def embedding_kind_from_proto(number: common_pb2.PoolingKind) -> PoolingKind | None:
    """Convert an `EmbedRequest`'s kind of pooling; return None for the model's default kind."""
    if number == common_pb2.POOLING_KIND_UNSPECIFIED:
        return None
    kind = pooling_kind_from_proto(number, "pooling")
    if kind is PoolingKind.SCORE:
        raise InvalidArgumentError("pooling", "is SCORE; Embed makes vectors")
    return kind


def stop_options_to_bytes(request: GenerateRequest) -> bytes:
    """Serialize the `StopOptions`, which a router needs besides `Submit` to resume the request."""
    thinking = request.thinking
    return scheduler_pb2.StopOptions(
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        thinking=None
        if thinking is None
        else scheduler_pb2.ThinkingMarkers(
            begin=thinking.begin,
            ends=thinking.ends,
            has_begun=thinking.has_begun,
            recurs=thinking.recurs,
        ),
        stream_interval=request.stream_interval,
    ).SerializeToString()


def stop_options_from_bytes(record: bytes) -> StopOptions:
    """Parse stop options; raises `google.protobuf.message.DecodeError` for malformed bytes."""
    message = scheduler_pb2.StopOptions.FromString(record)
    thinking = None
    if message.thinking.begin and message.thinking.ends:
        marked = message.thinking
        thinking = ThinkingMarkers(
            marked.begin, tuple(marked.ends), marked.has_begun, marked.recurs
        )
    return StopOptions(
        tuple(message.stop),
        message.include_stop_str_in_output,
        message.skip_special_tokens,
        thinking,
        message.stream_interval or 1,
    )


def resume_request_from_proto(
    message: inference_pb2.ResumeRequest, tenant: str, deadline: float | None
) -> ResumeRequest:
    """Convert a resume request; raises InvalidArgumentError if its request id is empty."""
    if not message.request_id:
        raise InvalidArgumentError("request_id", "is empty; it must name the request to resume")
    return ResumeRequest(
        request_id=message.request_id,
        tenant=tenant,
        received={
            part.output_index: OutputReceived(part.num_tokens, part.num_text_bytes, part.finished)
            for part in message.received
        },
        has_prompt_scores=message.has_prompt_scores,
        deadline=deadline,
    )


def model_from_proto(message: common_pb2.ModelInfo) -> Model:
    return Model(
        message.id,
        message.max_model_len,
        message.vocab_size,
        tuple(message.eos_token_ids),
        message.structured_output,
        message.parent,
        abilities=abilities_from_proto(message),
    )


def model_to_proto(model: Model) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        id=model.id,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        structured_output=model.structured_output,
        parent=model.parent,
        **abilities_to_proto(model.abilities),
    )

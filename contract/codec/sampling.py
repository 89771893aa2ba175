"""Converts sampling parameters, structured output and beam searches to protobuf and back."""

from contract.codec.fields import Converters, changed_fields, set_fields
from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
from contract.pooling import Pooling, PoolingKind
from contract.sampling import BeamSearch, EarlyStopping, SamplingParams, StructuredOutput
from quire.v1 import common_pb2

_EARLY_STOPPING_TO_PROTO = {
    EarlyStopping.HEURISTIC: common_pb2.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.WHEN_FULL: common_pb2.EARLY_STOPPING_WHEN_FULL,
    EarlyStopping.NEVER: common_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_FROM_PROTO = {
    common_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{proto: value for value, proto in _EARLY_STOPPING_TO_PROTO.items()},
}
POOLING_KIND_TO_PROTO = {
    PoolingKind.LAST: common_pb2.POOLING_KIND_LAST,
    PoolingKind.MEAN: common_pb2.POOLING_KIND_MEAN,
    PoolingKind.CLS: common_pb2.POOLING_KIND_CLS,
    PoolingKind.SCORE: common_pb2.POOLING_KIND_SCORE,
}
_POOLING_KIND_FROM_PROTO = {proto: kind for kind, proto in POOLING_KIND_TO_PROTO.items()}


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Convert parameters without checking ranges; `SamplingParams.check` checks the ranges.

    Raises:
        InvalidArgumentError: `structured` is set without a valid form, or this version does not
            know the kind of `pooling`.
    """
    return SamplingParams(**set_fields(message, _SAMPLING_FROM_PROTO))


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Convert parameters; fields at their defaults stay unset."""
    return common_pb2.SamplingParams(**changed_fields(sampling, _SAMPLING_TO_PROTO))


def structured_from_proto(message: common_pb2.StructuredOutput) -> StructuredOutput:
    """Convert the form of an output; raises InvalidArgumentError if the message sets no form."""
    match name := message.WhichOneof("form"):
        case None:
            raise InvalidArgumentError(
                "sampling.structured", "is empty; one of its fields must be set"
            )
        case "json_object":
            if not message.json_object:
                raise InvalidArgumentError("sampling.structured.json_object", "is false; unset it")
            return StructuredOutput(json_object=True)
        case "choice":
            return StructuredOutput(choice=tuple(message.choice.texts))
        case _:
            return StructuredOutput(**{name: getattr(message, name)})


def structured_to_proto(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    """Convert the form of an output; raises InvalidArgumentError unless exactly one form is set."""
    match name := structured.form:
        case "json_schema":
            return common_pb2.StructuredOutput(json_schema=structured.schema_text)
        case "choice":
            return common_pb2.StructuredOutput(choice=common_pb2.Choice(texts=structured.choice))
        case _:
            return common_pb2.StructuredOutput(**{name: getattr(structured, name)})


def adapter_from_proto(message: common_pb2.LoraAdapter) -> LoraAdapter:
    return LoraAdapter(message.name, message.digest, message.directory)


def _wanted_adapter_to_proto(adapter: LoraAdapter) -> common_pb2.LoraAdapter:
    """Convert name and digest of an adapter; requests do not have the directory."""
    return common_pb2.LoraAdapter(name=adapter.name, digest=adapter.digest)


def pooling_kind_from_proto(number: common_pb2.PoolingKind, field: str) -> PoolingKind:
    """Convert a kind of pooling; raises InvalidArgumentError if this version does not know it."""
    if number not in _POOLING_KIND_FROM_PROTO:
        raise InvalidArgumentError(field, f"is {number}, which this version does not know")
    return _POOLING_KIND_FROM_PROTO[number]


def pooling_from_proto(message: common_pb2.Pooling) -> Pooling:
    """Convert a pooling; raises InvalidArgumentError for an unknown kind.

    `dimensions` is not checked, because its limit depends on the model.
    """
    return Pooling(
        kind=pooling_kind_from_proto(message.kind, "pooling.kind"),
        normalize=message.normalize,
        dimensions=message.dimensions or None,
        num_first_tokens=message.num_first_tokens,
    )


def pooling_to_proto(pooling: Pooling) -> common_pb2.Pooling:
    return common_pb2.Pooling(
        kind=POOLING_KIND_TO_PROTO[pooling.kind],
        normalize=pooling.normalize,
        dimensions=pooling.dimensions or 0,
        num_first_tokens=pooling.num_first_tokens,
    )


def beam_from_proto(message: common_pb2.BeamSearch) -> BeamSearch:
    """Convert parameters without checking ranges; `BeamSearch.check` checks the ranges.

    Raises:
        InvalidArgumentError: This version does not know the value of `early_stopping`.
    """
    if message.early_stopping not in _EARLY_STOPPING_FROM_PROTO:
        raise InvalidArgumentError(
            "beam.early_stopping", f"is {message.early_stopping}, which this version does not know"
        )
    return BeamSearch(
        width=message.width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING_FROM_PROTO[message.early_stopping],
    )


def beam_to_proto(beam: BeamSearch) -> common_pb2.BeamSearch:
    return common_pb2.BeamSearch(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=_EARLY_STOPPING_TO_PROTO[EarlyStopping.of(beam.early_stopping)],
    )


# Parameters that are numbers or flags are copied unchanged and need no entry here.
_SAMPLING_FROM_PROTO: Converters = {
    "logit_bias": dict,
    "stop_token_ids": tuple,
    "allowed_token_ids": tuple,
    "structured": structured_from_proto,
    "adapter": adapter_from_proto,
    "pooling": pooling_from_proto,
}
_SAMPLING_TO_PROTO: Converters = {
    "structured": structured_to_proto,
    "adapter": _wanted_adapter_to_proto,
    "pooling": pooling_to_proto,
}

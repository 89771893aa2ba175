"""Sampling parameters, forms and beam searches to protobuf and back."""

from contract.codec.fields import Converters, changed_fields, set_fields
from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
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


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Raise InvalidArgumentError for an empty form; `SamplingParams.check` checks the ranges."""
    return SamplingParams(**set_fields(message, _SAMPLING_FROM_PROTO))


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Leave fields at their defaults unset, which means the same."""
    return common_pb2.SamplingParams(**changed_fields(sampling, _SAMPLING_TO_PROTO))


def structured_from_proto(message: common_pb2.StructuredOutput) -> StructuredOutput:
    """Raise InvalidArgumentError unless a form is set."""
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
    """Raise InvalidArgumentError unless exactly one form is set."""
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
    """Write what a request says of an adapter: its directory is not part of a request."""
    return common_pb2.LoraAdapter(name=adapter.name, digest=adapter.digest)


def beam_from_proto(message: common_pb2.BeamSearch) -> BeamSearch:
    """Raise InvalidArgumentError for an unknown enum; ranges are checked by `BeamSearch.check`."""
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


# A parameter that is a number or a flag needs no row here.
_SAMPLING_FROM_PROTO: Converters = {
    "logit_bias": dict,
    "stop_token_ids": tuple,
    "allowed_token_ids": tuple,
    "structured": structured_from_proto,
    "adapter": adapter_from_proto,
}
_SAMPLING_TO_PROTO: Converters = {
    "structured": structured_to_proto,
    "adapter": _wanted_adapter_to_proto,
}

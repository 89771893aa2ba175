"""Parses the sampling parameters and the adapter of a sequence from protobuf."""

from collections.abc import Mapping
from dataclasses import replace

from contract.codec.sampling import sampling_from_proto
from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
from contract.sampling import MAX_CANDIDATES, SamplingParams
from quire.v1 import common_pb2

_FIELD = "new_sequences.sampling"


def sampling_params_from_proto(
    message: common_pb2.SamplingParams, output_index: int, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """Read sampling parameters; `output_index` is added to the seed modulo 2^64.

    Raises:
        InvalidArgumentError: The seed is missing, or a value is out of its range.
    """
    if not message.HasField("seed"):
        raise InvalidArgumentError(f"{_FIELD}.seed", "is not set")
    params = sampling_from_proto(message)
    if params.structured is not None:
        params.structured.check_grammar(f"{_FIELD}.structured")
    params.check(
        _FIELD, vocab_size=vocab_size, max_model_len=max_model_len, max_logprobs=MAX_CANDIDATES
    )
    return replace(params, seed=(message.seed + output_index) % 2**64)


def adapter_from_proto(
    message: common_pb2.SamplingParams, adapters: Mapping[LoraAdapter, int]
) -> int:
    """Return the number of the adapter that the message names; 0 if it names none.

    Raises:
        InvalidArgumentError: The worker has no adapter with the message's name and digest.
    """
    if not message.HasField("adapter"):
        return 0
    wanted = LoraAdapter(message.adapter.name, message.adapter.digest)
    if (number := adapters.get(wanted)) is None:
        has = ", ".join(f"{a.name!r} ({a.digest.hex()[:8]})" for a in adapters) or "none"
        raise InvalidArgumentError(
            f"{_FIELD}.adapter",
            f"is {wanted.name!r} ({wanted.digest.hex()[:8]}); this worker has {has}",
        )
    return number

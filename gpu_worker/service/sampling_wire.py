"""How a sequence is sampled, from protobuf."""

import math
from collections.abc import Mapping

from contract.codec.checks import check_num_entries, check_number, check_positive
from contract.errors import InvalidArgumentError
from contract.lora import LoraAdapter
from gpu_worker.sampling.params import MAX_STOP_TOKEN_IDS, SamplingParams
from quire.v1 import common_pb2

_MAX_LOGIT_BIASES = 1024
_MAX_LOGPROBS = 1024
"""More than a client may ask for: the candidates of a beam search."""


def sampling_params_from_proto(
    params: common_pb2.SamplingParams, output_index: int, vocab_size: int
) -> SamplingParams:
    """Parse sampling parameters, with `output_index` added to the seed modulo 2^64.

    Raises:
        InvalidArgumentError: a value is out of the range that the proto gives.
    """
    field = "new_sequences.sampling"
    if not params.HasField("seed"):
        raise InvalidArgumentError(f"{field}.seed", "is not set")
    parsed = SamplingParams(
        seed=(params.seed + output_index) % 2**64,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(params.stop_token_ids)),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        grammar=params.structured.grammar if params.HasField("structured") else None,
    )
    if parsed.grammar == "":
        raise InvalidArgumentError(f"{field}.structured.grammar", "is not set")
    check_number(f"{field}.temperature", parsed.temperature, 0, 100)
    check_number(f"{field}.top_k", parsed.top_k, 0, vocab_size)
    check_positive(f"{field}.top_p", parsed.top_p, 1)
    check_number(f"{field}.min_p", parsed.min_p, 0, 1)
    check_positive(f"{field}.repetition_penalty", parsed.repetition_penalty, 100)
    check_number(f"{field}.presence_penalty", parsed.presence_penalty, -2, 2)
    check_number(f"{field}.frequency_penalty", parsed.frequency_penalty, -2, 2)
    check_number(f"{field}.min_tokens", parsed.min_tokens, 0, math.inf)
    check_number(f"{field}.logprobs", parsed.logprobs or 0, 0, _MAX_LOGPROBS)
    check_number(f"{field}.prompt_logprobs", parsed.prompt_logprobs or 0, 0, _MAX_LOGPROBS)
    check_num_entries(f"{field}.logit_bias", len(parsed.logit_bias), 0, _MAX_LOGIT_BIASES)
    check_num_entries(f"{field}.stop_token_ids", len(parsed.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
    for token_id, bias in parsed.logit_bias:
        check_number(f"{field}.logit_bias", token_id, 0, vocab_size - 1)
        check_number(f"{field}.logit_bias[{token_id}]", bias, -100, 100)
    for token_id in parsed.stop_token_ids:
        check_number(f"{field}.stop_token_ids", token_id, 0, vocab_size - 1)
    return parsed


def adapter_from_proto(
    params: common_pb2.SamplingParams, adapters: Mapping[LoraAdapter, int]
) -> int:
    """Find the number of the adapter that is asked for; 0: none is.

    Raises:
        InvalidArgumentError: the worker has no adapter of this name with these contents.
    """
    if not params.HasField("adapter"):
        return 0
    wanted = LoraAdapter(params.adapter.name, params.adapter.digest)
    if (number := adapters.get(wanted)) is None:
        has = ", ".join(f"{a.name!r} ({a.digest.hex()[:8]})" for a in adapters) or "none"
        raise InvalidArgumentError(
            "new_sequences.sampling.adapter",
            f"is {wanted.name!r} ({wanted.digest.hex()[:8]}); this worker has {has}",
        )
    return number

"""Converts a router's `Submit` to a request of the core."""

from math import isfinite

from contract.arrays import Int32Array
from contract.codec.message_checks import check_values
from contract.codec.packing import unpack_int32
from contract.codec.sampling import pooling_from_proto, sampling_from_proto
from contract.errors import InvalidArgumentError, NotFoundError
from contract.info import ModelInfo
from contract.lora import LoraAdapter
from contract.pooling import Pooling
from contract.request import (
    MAX_CACHE_PIN_S,
    MAX_CACHE_SALT_CHARS,
    MAX_N,
    MAX_PRIORITY,
    MAX_REQUEST_ID_CHARS,
)
from contract.value_checks import check_chars, check_range
from quire.v1 import common_pb2, scheduler_pb2
from scheduler_svc.core.interface.request import OutputSoFar, Request, SeqKey, SourceId
from scheduler_svc.domain import ADAPTERS_SALT, adapter_salt
from scheduler_svc.wire.beam import beam_params_from_proto, beam_sampling

_MAX_SEQ_KEY = 2**64 - 1
_MAX_TENANT_BYTES = 128
_MAX_TRACEPARENT_CHARS = 128
_MAX_MODEL_LEN = 2**31 - 1
"""The limit on the tokens of a sequence, with any model, because token counts are int32."""


def request_from_proto(
    message: scheduler_pb2.Submit, source: SourceId, model: ModelInfo, now: float
) -> Request:
    """Parse a router's request; `now` is the time of its arrival, by `time.monotonic`.

    Raises:
        InvalidArgumentError: A field is invalid; the message names the value and the limit.
        NotFoundError: The workers do not have the request's adapter.
    """
    _check(message)
    _check_sampling(message.sampling, model)
    pooling = _check_pooling(message, model)
    prompt_token_ids = _token_ids_from_proto(
        message.prompt_token_ids, "prompt_token_ids", model.vocab_size
    )
    if not prompt_token_ids.size:
        raise InvalidArgumentError("prompt_token_ids", "is empty; it must have at least 1 token")
    deadline_s = message.deadline_s if message.HasField("deadline_s") else None
    if deadline_s is not None and not (isfinite(deadline_s) and deadline_s >= 0):
        raise InvalidArgumentError("deadline_s", f"is {deadline_s}; it must be at least 0")
    cache_pin_s = message.cache_pin_s if message.HasField("cache_pin_s") else None
    if cache_pin_s is not None and not 0 < cache_pin_s <= MAX_CACHE_PIN_S:  # also for NaN
        raise InvalidArgumentError(
            "cache_pin_s", f"is {cache_pin_s}; it must be in (0, {MAX_CACHE_PIN_S}]"
        )
    beam = beam_params_from_proto(message, model) if message.HasField("beam") else None
    sampling = message.sampling if beam is None else beam_sampling(beam, message.sampling)
    return Request(
        source=source,
        first_seq_key=SeqKey(message.first_seq_key),
        request_id=message.request_id,
        prompt_token_ids=prompt_token_ids,
        n=message.n,
        max_tokens=message.sampling.max_tokens,
        sampling=sampling.SerializeToString(deterministic=True),  # equal requests get equal bytes
        cache_salt=_prefix_salt(message, model),
        traceparent=message.traceparent,
        min_tokens=message.sampling.min_tokens,
        priority=message.priority,
        tenant=message.tenant,
        deadline=None if deadline_s is None else now + deadline_s,
        pools=pooling is not None,
        reads_prefix_cache=not (
            message.sampling.HasField("prompt_logprobs")
            or (pooling is not None and pooling.needs_all)
        ),
        cache_pin_s=cache_pin_s,
        beam=beam,
        outputs=tuple(
            OutputSoFar(
                token_ids=_token_ids_from_proto(
                    output.token_ids, f"outputs[{index}].token_ids", model.vocab_size
                ),
                finished=output.finished,
            )
            for index, output in enumerate(message.outputs)
        ),
    )


def _prefix_salt(message: scheduler_pb2.Submit, model: ModelInfo) -> str:
    if not message.sampling.HasField("adapter"):
        return message.cache_salt
    adapter = LoraAdapter(message.sampling.adapter.name, message.sampling.adapter.digest)
    if adapter not in model.adapters:
        raise NotFoundError(f"{adapter} is not served; {model} is")
    return adapter_salt(adapter) + message.cache_salt


def check_keys(first_seq_key: int, n: int) -> None:
    """Raise InvalidArgumentError unless `n` keys from `first_seq_key` on fit into 64 bits."""
    if first_seq_key + n - 1 > _MAX_SEQ_KEY:
        raise InvalidArgumentError(
            "first_seq_key",
            f"is {first_seq_key}; with n = {n} it must be at most {_MAX_SEQ_KEY - n + 1}",
        )


def _check_sampling(message: common_pb2.SamplingParams, model: ModelInfo) -> None:
    """Check all parameters that a worker checks.

    If a worker refused a parameter, the worker's stream of steps would end, and all requests at the
    worker would be interrupted. The core checks later whether the request fits into the block pool.
    """
    if not message.HasField("seed"):
        raise InvalidArgumentError("sampling.seed", "is not set; the router must choose one")
    if not message.HasField("max_tokens"):
        raise InvalidArgumentError("sampling.max_tokens", "is not set; it must be at least 1")
    sampling = sampling_from_proto(message)
    sampling.check("sampling", vocab_size=model.vocab_size, max_model_len=_MAX_MODEL_LEN)
    if sampling.structured is not None:
        sampling.structured.check_grammar("sampling.structured")
        if not model.structured_output:
            raise InvalidArgumentError(
                "sampling.structured", "is set; this model's outputs cannot be given a form"
            )


def _check_pooling(message: scheduler_pb2.Submit, model: ModelInfo) -> Pooling | None:
    """Return the request's pooling, None if it has none; check that the model can do the task."""
    pooling = None
    if message.sampling.HasField("pooling"):
        pooling = pooling_from_proto(message.sampling.pooling)
        if (message.n, message.sampling.max_tokens) != (1, 1):
            raise InvalidArgumentError(
                "sampling.pooling",
                f"is set with n = {message.n} and max_tokens = {message.sampling.max_tokens}; both"
                " must be 1",
            )
        if message.HasField("resume_record") or message.HasField("beam"):
            raise InvalidArgumentError(
                "sampling.pooling", "is set; with resume_record or beam it must not be"
            )
    model.abilities.check(pooling, model.id)
    return pooling


def _check(message: scheduler_pb2.Submit) -> None:
    """Check the fields of a request that need no parsing."""
    check_chars("request_id", message.request_id, MAX_REQUEST_ID_CHARS)
    check_chars("cache_salt", message.cache_salt, MAX_CACHE_SALT_CHARS)
    check_chars("traceparent", message.traceparent, _MAX_TRACEPARENT_CHARS)
    check_range("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if message.cache_salt.startswith(ADAPTERS_SALT):
        raise InvalidArgumentError(
            "cache_salt", f"is {message.cache_salt!r}; it must not begin with U+0000"
        )
    if not 1 <= message.n <= MAX_N:
        raise InvalidArgumentError("n", f"is {message.n}; it must be in [1, {MAX_N}]")
    check_keys(message.first_seq_key, message.n)
    if len(message.tenant.encode()) > _MAX_TENANT_BYTES:
        raise InvalidArgumentError(
            "tenant",
            f"has {len(message.tenant.encode())} bytes; it must have at most {_MAX_TENANT_BYTES}",
        )
    if len(message.outputs) not in {0, message.n}:
        raise InvalidArgumentError(
            "outputs", f"has {len(message.outputs)} entries; it must have 0 or n = {message.n}"
        )


def _token_ids_from_proto(packed: bytes, field: str, vocab_size: int) -> Int32Array:
    token_ids = unpack_int32(packed, field)
    check_values(field, token_ids, 0, vocab_size - 1)
    return token_ids

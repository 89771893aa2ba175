"""Checks a request against the limits that the public contract states.

Each function raises `InvalidArgumentError` naming field, value and limit.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from contract.errors import InvalidArgumentError, UnimplementedError
from router.domain import BeamSearch, GenerateRequest, ModelInfo, SamplingParams

MAX_REQUEST_ID_CHARS: Final = 128
MAX_CACHE_SALT_CHARS: Final = 128
MAX_CACHE_PIN_S: Final = 86400
MAX_TENANT_CHARS: Final = 128
MAX_PRIORITY: Final = 100
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGIT_BIAS_ENTRIES: Final = 1024
MAX_LOGIT_BIAS: Final = 100
MAX_LOGPROBS: Final = 20
MAX_N: Final = 64
MIN_BEAM_WIDTH: Final = 2
MAX_BEAM_WIDTH: Final = 10
MAX_LENGTH_PENALTY: Final = 5
MAX_SEED: Final = 2**64 - 1

_NOT_WITH_BEAM: Final = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "structured",
)
"""Fields of `SamplingParams` that a beam search has no use for."""


def check_request(request: GenerateRequest, model: ModelInfo, max_prompt_bytes: int) -> None:
    """Checks everything that can be checked before the prompt is tokenized.

    No text of more than `max_prompt_bytes` can fit the context, however it is tokenized.
    """
    _check_chars("request_id", request.request_id, MAX_REQUEST_ID_CHARS)
    if not request.request_id.isprintable():
        raise InvalidArgumentError(
            "request_id", f"is {request.request_id!r}; it must have printable characters only"
        )
    _check_chars("cache_salt", request.cache_salt, MAX_CACHE_SALT_CHARS)
    if request.cache_pin_s is not None:
        _check_range("cache_pin_s", request.cache_pin_s, 0, MAX_CACHE_PIN_S, open_below=True)
    _check_chars("tenant", request.tenant, MAX_TENANT_CHARS)
    if not (request.tenant.isascii() and request.tenant.isprintable()):
        raise InvalidArgumentError(
            "tenant", f"is {request.tenant!r}; it must have printable ASCII characters only"
        )
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_range("n", request.n, 1, MAX_N)
    _check_stop(request.stop)
    check_sampling(request.sampling, model)
    if request.beam is not None:
        _check_search(request, request.beam, model)
    if isinstance(request.prompt, str):
        if not request.prompt:
            raise InvalidArgumentError("prompt", "is empty; it must have at least 1 character")
        check_text("prompt", request.prompt, model, max_prompt_bytes)
    else:
        # Before its ids are looked at: a list that is far too long is refused without the walk.
        check_prompt_length(len(request.prompt), model)
        check_token_ids("prompt", request.prompt, model)


def check_sampling(sampling: SamplingParams, model: ModelInfo) -> None:
    """Checks every field but the relation of `max_tokens` to the prompt."""
    _check_range("sampling.temperature", sampling.temperature, 0, 100)
    _check_range("sampling.top_k", sampling.top_k, 0, model.vocab_size)
    _check_range("sampling.top_p", sampling.top_p, 0, 1, open_below=True)
    _check_range("sampling.min_p", sampling.min_p, 0, 1)
    _check_range(
        "sampling.repetition_penalty", sampling.repetition_penalty, 0, 100, open_below=True
    )
    _check_range("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    _check_range("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    if sampling.seed is not None:
        _check_range("sampling.seed", sampling.seed, 0, MAX_SEED)
    if sampling.max_tokens is not None:
        _check_range("sampling.max_tokens", sampling.max_tokens, 1, model.max_model_len)
    _check_range(
        "sampling.min_tokens", sampling.min_tokens, 0, sampling.max_tokens or model.max_model_len
    )
    if sampling.logprobs is not None:
        _check_range("sampling.logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    if sampling.prompt_logprobs is not None:
        _check_range("sampling.prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS)
    if sampling.structured is not None:
        _check_structured(sampling, model)
    _check_count("sampling.stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    _check_count("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgumentError(
                "sampling.logit_bias",
                f"has the token id {token_id}; it must be in [0, {model.vocab_size})",
            )
        _check_range(f"sampling.logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_search(request: GenerateRequest, beam: BeamSearch, model: ModelInfo) -> None:
    """Checks a beam search, and that nothing else is asked for that draws or changes a draw."""
    _check_range("beam.width", beam.width, MIN_BEAM_WIDTH, MAX_BEAM_WIDTH)
    _check_range("n", request.n, 1, beam.width)
    penalty = beam.length_penalty
    _check_range("beam.length_penalty", penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    sampling, neutral = request.sampling, SamplingParams()
    if sampling.temperature not in {0, 1}:
        raise InvalidArgumentError(
            "sampling.temperature",
            f"is {sampling.temperature}; with beam it must be 0, 1 or unset: the search goes by the"
            " model's own distribution",
        )
    for name in _NOT_WITH_BEAM:
        if getattr(sampling, name) != getattr(neutral, name):
            raise InvalidArgumentError(f"sampling.{name}", "is set; with beam it must not be")
    if request.stop:
        raise InvalidArgumentError(
            "stop", f"has {len(request.stop)} entries; with beam it must have none"
        )
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    num_kept = max(2, 1 + len(ends)) * beam.width
    if num_kept > model.vocab_size:
        raise InvalidArgumentError(
            "beam.width",
            f"is {beam.width}; with {len(ends)} tokens that end an output the vocabulary, which"
            f" has {model.vocab_size} tokens, must have at least {num_kept}",
        )


def settle_sampling(
    sampling: SamplingParams, num_prompt_tokens: int, model: ModelInfo, seed: int
) -> SamplingParams:
    """Gives the parameters with `seed` and `max_tokens` set, for a prompt of this length."""
    check_prompt_length(num_prompt_tokens, model)
    room = model.max_model_len - num_prompt_tokens
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room:
        raise InvalidArgumentError(
            "sampling.max_tokens",
            f"is {max_tokens}; it must be at most {room}: the model's context is"
            f" {model.max_model_len} tokens, of which the prompt takes {num_prompt_tokens}",
        )
    _check_range("sampling.min_tokens", sampling.min_tokens, 0, max_tokens)
    return dataclasses.replace(
        sampling, max_tokens=max_tokens, seed=seed if sampling.seed is None else sampling.seed
    )


def check_prompt_length(num_prompt_tokens: int, model: ModelInfo) -> None:
    """Checks that there is a prompt, and that it leaves room for one token."""
    if num_prompt_tokens == 0:
        raise InvalidArgumentError("prompt", "is empty; it must have at least 1 token")
    if num_prompt_tokens >= model.max_model_len:
        raise InvalidArgumentError(
            "prompt",
            f"has {num_prompt_tokens} tokens; it must have at most {model.max_model_len - 1}, one"
            " less than the model's context",
        )


def check_text(field: str, text: str, model: ModelInfo, max_bytes: int) -> None:
    """Checks a text's size before it is tokenized: more than `max_bytes` cannot fit the context."""
    _check_num_bytes(field, check_unicode(field, text), model, max_bytes)


def check_chat(messages: Sequence[Mapping[str, Any]], model: ModelInfo, max_bytes: int) -> None:
    """Checks a chat's size before its template renders it, by what the messages hold."""
    _check_count("messages", len(messages), model.max_model_len)
    num_bytes = 0
    for i, message in enumerate(messages):
        for name, value in message.items():
            num_bytes += check_unicode(f"messages[{i}].{name}", str(value))
    _check_num_bytes("messages", num_bytes, model, max_bytes)


def check_num_token_ids(field: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    """Checks that there are no more ids than prompt and output may have together."""
    _check_count(field, len(token_ids), model.max_model_len)


def check_unicode(field: str, text: str) -> int:
    """Checks that a text can be written as UTF-8; gives its length in bytes."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        # JSON can escape half of a surrogate pair; no encoding can carry it.
        raise InvalidArgumentError(
            field,
            f"has U+{ord(text[error.start]):04X} at {error.start}, half of a surrogate pair;"
            " it must be valid Unicode",
        ) from None


def check_token_ids(field: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    """Checks that ids, if any, are of the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        return
    for i, token_id in enumerate(token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgumentError(
                f"{field}[{i}]", f"is {token_id}; it must be in [0, {model.vocab_size})"
            )


def _check_structured(sampling: SamplingParams, model: ModelInfo) -> None:
    """What the form says is looked at when it is made a grammar."""
    if not model.structured_output:
        raise UnimplementedError("sampling.structured: this model's outputs cannot be given a form")
    # The form's end is told by an end-of-sequence token.
    if sampling.ignore_eos:
        raise InvalidArgumentError(
            "sampling.ignore_eos", "is true; with structured it must be unset"
        )
    if sampling.min_tokens:
        raise InvalidArgumentError(
            "sampling.min_tokens", f"is {sampling.min_tokens}; with structured it must be unset"
        )


def _check_num_bytes(field: str, num_bytes: int, model: ModelInfo, most: int) -> None:
    if num_bytes > most:
        raise InvalidArgumentError(
            field,
            f"has {num_bytes} bytes; at most {most} can fit the model's context of"
            f" {model.max_model_len} tokens",
        )


def _check_stop(stop: Sequence[str]) -> None:
    _check_count("stop", len(stop), MAX_STOP_STRINGS)
    for i, string in enumerate(stop):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            raise InvalidArgumentError(
                f"stop[{i}]",
                f"has {len(string)} characters; it must have 1 to {MAX_STOP_STRING_CHARS}",
            )
        check_unicode(f"stop[{i}]", string)


def _check_chars(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidArgumentError(
            field, f"has {len(text)} characters; it must have at most {most}"
        )
    check_unicode(field, text)


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgumentError(field, f"has {count} entries; it must have at most {most}")


def _check_range(
    field: str, value: float, least: float, most: float, *, open_below: bool = False
) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if (least < value if open_below else least <= value) and value <= most:
        return
    bracket = "(" if open_below else "["
    raise InvalidArgumentError(field, f"is {value}; it must be in {bracket}{least}, {most}]")

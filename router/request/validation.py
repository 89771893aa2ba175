"""Checks a request against the served model, and fills in the parameters that the client left out.

The functions raise `InvalidArgumentError`, which names field, value and limit, or
`UnimplementedError`. The limits that do not depend on the model are in `contract`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final

from contract.errors import ContextLengthError, InvalidArgumentError, UnimplementedError
from contract.request import (
    MAX_CACHE_PIN_S,
    MAX_CACHE_SALT_CHARS,
    MAX_N,
    MAX_PRIORITY,
    MAX_REQUEST_ID_CHARS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STREAM_INTERVAL,
    GenerateRequest,
    Model,
)
from contract.sampling import BeamSearch, SamplingParams
from contract.value_checks import (
    check_chars,
    check_count,
    check_range,
    check_token_ids,
    check_unicode,
)
from router.access.tenancy import check_tenant
from router.text.size_limits import check_text

_BEAM_ALLOWS: Final = frozenset(
    ("temperature", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "adapter")
)
"""Fields of `SamplingParams` that a request with a beam search may set."""


def check_request(request: GenerateRequest, model: Model, max_prompt_bytes: int) -> None:
    """Check the parts of a request that can be checked before the prompt is tokenized.

    A text of more than `max_prompt_bytes` cannot fit the context, however it is tokenized.
    """
    check_chars("request_id", request.request_id, MAX_REQUEST_ID_CHARS)
    if not request.request_id.isprintable():
        raise InvalidArgumentError(
            "request_id", f"is {request.request_id!r}; it must have printable characters only"
        )
    check_chars("cache_salt", request.cache_salt, MAX_CACHE_SALT_CHARS)
    if request.cache_pin_s is not None:
        check_range("cache_pin_s", request.cache_pin_s, 0, MAX_CACHE_PIN_S, open_below=True)
    check_tenant(request.tenant)
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    check_range("n", request.n, 1, MAX_N)
    if request.stream_interval is not None:
        check_range("stream_interval", request.stream_interval, 1, MAX_STREAM_INTERVAL)
    _check_stop(request.stop)
    request.sampling.check(
        "sampling", vocab_size=model.vocab_size, max_model_len=model.max_model_len
    )
    if request.bad_words:
        _check_bad_words(request)
    model.abilities.check(request.sampling.pooling, model.id)
    if request.sampling.structured is not None or request.bad_words:
        _check_structured(request.sampling, model)
    if request.truncate_prompt_tokens is not None and request.truncate_prompt_tokens != -1:
        check_range(
            "truncate_prompt_tokens", request.truncate_prompt_tokens, 1, model.max_prompt_len
        )
    if request.beam is not None:
        _check_beam(request, request.beam, model)
    if isinstance(request.prompt, str):
        if not request.prompt:
            raise InvalidArgumentError("prompt", "is empty; it must have at least 1 character")
        if request.truncate_prompt_tokens is None:
            check_text("prompt", request.prompt, model, max_prompt_bytes)
        else:
            check_unicode("prompt", request.prompt)
    else:
        # Check the length first, so that the refusal of a much too long list is cheap.
        if request.truncate_prompt_tokens is None or not request.prompt:
            check_prompt_length(len(request.prompt), model)
        check_token_ids("prompt", request.prompt, model.vocab_size)
    if request.pair is not None:
        if request.truncate_prompt_tokens is None:
            check_text("pair", request.pair, model, max_prompt_bytes)
        else:
            check_unicode("pair", request.pair)


def _check_stop(stop: Sequence[str]) -> None:
    check_count("stop", len(stop), MAX_STOP_STRINGS)
    for i, string in enumerate(stop):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            raise InvalidArgumentError(
                f"stop[{i}]",
                f"has {len(string)} characters; it must have 1 to {MAX_STOP_STRING_CHARS}",
            )
        check_unicode(f"stop[{i}]", string)


def _check_bad_words(request: GenerateRequest) -> None:
    """Refuse fields that cannot be combined with `bad_words`, which a grammar enforces."""
    if request.sampling.structured is not None:
        raise InvalidArgumentError("bad_words", "is set; with structured it must be unset")
    if request.beam is not None:
        raise InvalidArgumentError("bad_words", "is set; with beam it must be unset")


def _check_structured(sampling: SamplingParams, model: Model) -> None:
    """Refuse fields that cannot be combined with structured output."""
    if not model.structured_output:
        raise UnimplementedError("sampling.structured: this model does not support it")
    # An end-of-sequence token ends the structured output.
    if sampling.ignore_eos:
        raise InvalidArgumentError(
            "sampling.ignore_eos", "is true; with structured it must be unset"
        )
    if sampling.min_tokens:
        raise InvalidArgumentError(
            "sampling.min_tokens", f"is {sampling.min_tokens}; with structured it must be unset"
        )
    if sampling.allowed_token_ids:
        raise InvalidArgumentError(
            "sampling.allowed_token_ids", "is set; with structured it must be unset"
        )


def _check_beam(request: GenerateRequest, beam: BeamSearch, model: Model) -> None:
    """Check `beam`, and refuse fields that cannot be combined with a beam search."""
    beam.check(request.n)
    sampling, neutral = request.sampling, SamplingParams()
    if sampling.temperature not in {0, 1}:
        raise InvalidArgumentError(
            "sampling.temperature",
            f"is {sampling.temperature}; with beam it must be 0, 1 or unset, because the search"
            " uses the model's own distribution",
        )
    for field in dataclasses.fields(SamplingParams):
        if field.name not in _BEAM_ALLOWS and (
            getattr(sampling, field.name) != getattr(neutral, field.name)
        ):
            raise InvalidArgumentError(
                f"sampling.{field.name}", "is set; with beam it must be unset"
            )
    if request.stop:
        raise InvalidArgumentError(
            "stop", f"has {len(request.stop)} entries; with beam it must have none"
        )
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    num_kept = max(2, 1 + len(ends)) * beam.width
    if num_kept > model.vocab_size:
        raise InvalidArgumentError(
            "beam.width",
            f"is {beam.width}; with {len(ends)} tokens that end an output, the vocabulary must have"
            f" at least {num_kept} tokens, and has {model.vocab_size}",
        )


def complete_sampling(
    sampling: SamplingParams,
    num_prompt_tokens: int,
    model: Model,
    seed: int,
    *,
    cuts_max_tokens: bool = False,
    is_pair: bool = False,
) -> SamplingParams:
    """Return `sampling`, with `seed` and `max_tokens` filled in if they are not set."""
    check_prompt_length(num_prompt_tokens, model, "pair" if is_pair else "prompt")
    room = max(1, model.max_model_len - num_prompt_tokens)
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room and cuts_max_tokens:
        max_tokens = room
    if max_tokens > room:
        raise ContextLengthError(
            "sampling.max_tokens",
            f"is {max_tokens}; it must be at most {room}, since the model's context has"
            f" {model.max_model_len} tokens and the prompt {num_prompt_tokens}",
        )
    check_range("sampling.min_tokens", sampling.min_tokens, 0, max_tokens)
    return dataclasses.replace(
        sampling, max_tokens=max_tokens, seed=seed if sampling.seed is None else sampling.seed
    )


def check_prompt_length(num_prompt_tokens: int, model: Model, field: str = "prompt") -> None:
    """Check that the prompt has at least one token, and not more than the model accepts."""
    if num_prompt_tokens == 0:
        raise InvalidArgumentError(field, "is empty; it must have at least 1 token")
    if num_prompt_tokens > model.max_prompt_len:
        less = ", one less than the model's context" if model.abilities.generates else ""
        raise ContextLengthError(
            field,
            f"has {num_prompt_tokens} tokens; it must have at most {model.max_prompt_len}{less}",
        )

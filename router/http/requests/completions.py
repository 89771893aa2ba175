"""POST /v1/completions: the body, and its conversion to a `ClientCall`."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, TypeAlias

from pydantic import PlainValidator

from contract.errors import InvalidArgumentError
from router.http.answers.answer import ClientCall
from router.http.answers.objects import CompletionShape, Echo
from router.http.requests.shared_fields import UNIMPLEMENTED, Body, Prompt
from router.http.strict_json import excerpt
from router.request.inference import Inference

MAX_PROMPTS = 1024
"""Limit on the prompts of one call."""

Prompts: TypeAlias = tuple[Prompt, ...]


def parse_prompts(value: object, field: str = "prompt", most: int = MAX_PROMPTS) -> Prompts:
    """Parse a value of one of four shapes: a text, texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError(
            field, f"is {excerpt(value)}; it must be a string, token ids, or a list of either"
        )
    if type(value[0]) is int:
        return (_parse_token_ids(value, field),)
    if len(value) > most:
        raise InvalidArgumentError(
            field, f"holds {len(value)} prompts; one call takes at most {most}"
        )
    if isinstance(value[0], list):
        return tuple(_parse_token_ids(item, f"{field}[{i}]") for i, item in enumerate(value))
    for i, item in enumerate(value):
        if not isinstance(item, str):
            raise InvalidArgumentError(f"{field}[{i}]", f"is {excerpt(item)}; it must be a string")
    return tuple(value)


def _parse_token_ids(value: object, field: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidArgumentError(field, f"is {excerpt(value)}; it must be a list of token ids")
    if not set(map(type, value)) <= {int}:  # a fast check that accepts a long list
        i, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise InvalidArgumentError(f"{field}[{i}]", f"is {excerpt(item)}; it must be a token id")
    return tuple(value)


class CompletionBody(Body):
    """POST /v1/completions."""

    unimplemented = MappingProxyType(
        {
            **UNIMPLEMENTED,
        }
    )

    prompt: Annotated[Prompts, PlainValidator(parse_prompts)]
    max_tokens: int = 16
    logprobs: int | None = None
    add_special_tokens: bool = True
    echo: bool = False
    prompt_logprobs: int | None = None
    suffix: str = ""
    """The text after the output, for models that fill in the middle."""

    def check(self) -> None:
        """Check fields against each other; may raise InvalidArgumentError."""
        super().check()
        if self.suffix and self.echo:
            raise InvalidArgumentError("echo", "is true; with suffix it must be false")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise InvalidArgumentError("suffix", "is set; it needs prompts that are text")

    @property
    def is_echo_only(self) -> bool:
        """Whether the client wants only the prompt back; the model computes one token anyway."""
        return self.echo and self.max_tokens == 0


def completion_call(inference: Inference, body: CompletionBody, request_id: str) -> ClientCall:
    """Make the `ClientCall` for a body; may raise QuireError."""
    body.check()
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        prompt_logprobs = body.logprobs
    sampling = body.sampling(
        max_tokens=1 if body.is_echo_only else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    prompts: list[Sequence[int]] = []

    def prompt(index: int) -> Echo:
        given, token_ids = body.prompt[index // body.n], prompts[index // body.n]
        if isinstance(given, str) and body.truncate_prompt_tokens is None:
            return Echo(given, token_ids)
        pieces = (inference.text.token_bytes(token_id) for token_id in token_ids)
        return Echo(b"".join(pieces).decode(errors="replace"), token_ids)

    is_one = len(body.prompt) == 1
    requests = [
        body.to_request(
            inference.text.infill(prompt, body.suffix)
            if body.suffix and isinstance(prompt, str)
            else prompt,
            request_id=request_id if is_one else f"{request_id}-{i}",
            sampling=sampling,
            add_special_tokens=body.add_special_tokens,
        )
        for i, prompt in enumerate(body.prompt)
    ]
    return ClientCall(
        request_id=request_id,
        requests=requests,
        n=body.n,
        shape=CompletionShape(
            body.shown_tokens(inference.text),
            has_logprobs=body.logprobs is not None,
            prompt=prompt,
            echo=body.echo,
            is_echo_only=body.is_echo_only,
            has_prompt_logprobs=body.prompt_logprobs is not None,
            has_token_ids=body.return_token_ids,
        ),
        prompts=prompts,
        hides_outputs=body.is_echo_only,
        stream=body.stream,
        usage_in_stream=body.usage_in_stream,
        field_to_json={**body.beam_field_to_json, **body.structured_field_to_json},
    )

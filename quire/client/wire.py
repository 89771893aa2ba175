"""Converts the Python client's requests to protobuf and metadata, and answers from protobuf."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from contract.codec.outputs import (
    finished_from_proto,
    logprob_from_proto,
    prompt_scores_from_proto,
    usage_from_proto,
)
from contract.codec.request import generate_request_to_proto, model_from_proto
from contract.codec.sampling import POOLING_KIND_TO_PROTO
from contract.errors import InvalidArgumentError, QuireError
from contract.outputs import Event, OutputDelta, OutputFinished, PromptScores, Usage
from contract.pooling import PoolingKind
from contract.request import GenerateRequest, Model
from contract.sampling import SamplingParams
from quire.client.types import (
    ChatMessage,
    Completion,
    Embeddings,
    EmbedOptions,
    GenerateOptions,
    Output,
)
from quire.v1 import inference_pb2


def request_to_proto(
    prompt: str | Sequence[int], sampling: SamplingParams, options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """Make a request for a prompt, which is text or token ids."""
    given: dict[str, Any] = {**options}
    return generate_request_to_proto(
        GenerateRequest(
            prompt if isinstance(prompt, str) else tuple(prompt), sampling=sampling, **given
        )
    )


def precedence_to_metadata(priority: int, tenant: str) -> list[tuple[str, str]]:
    """Return the metadata for a priority and a tenant; a default value (0, "") is left out.

    Raises InvalidArgumentError for invalid characters in `tenant`.
    """
    if not (tenant.isascii() and tenant.isprintable()):
        raise InvalidArgumentError(
            "tenant", f"is {tenant!r}; it must have printable ASCII characters only"
        )
    metadata = []
    if priority:
        metadata.append(("x-quire-priority", str(priority)))
    if tenant:
        metadata.append(("x-quire-tenant", tenant))
    return metadata


def api_key_to_metadata(api_key: str) -> list[tuple[str, str]]:
    """Make the metadata for an API key; none if `api_key` is empty.

    Raises InvalidArgumentError for invalid characters.
    """
    if not (api_key.isascii() and api_key.isprintable()):  # the error must not show the key
        raise InvalidArgumentError("api_key", "must have printable ASCII characters only")
    return [("authorization", f"Bearer {api_key}")] if api_key else []


def tokenize_request_to_proto(
    text_or_chat: str | Sequence[ChatMessage], model: str, *, add_special_tokens: bool
) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(model=model)
    if isinstance(text_or_chat, str):
        request.text = text_or_chat
        request.add_special_tokens = add_special_tokens
    else:
        request.chat.SetInParent()
        for message in text_or_chat:
            request.chat.messages.add(role=message.role, content=message.content)
    return request


def embed_request_to_proto(
    inputs: Sequence[str | Sequence[int]], options: EmbedOptions
) -> inference_pb2.EmbedRequest:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "pooling" in given:
        given["pooling"] = POOLING_KIND_TO_PROTO[PoolingKind(given["pooling"])]
    return inference_pb2.EmbedRequest(
        inputs=[
            inference_pb2.EmbedInput(text=each)
            if isinstance(each, str)
            else inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=each))
            for each in inputs
        ],
        **given,
    )


def embeddings_from_proto(response: inference_pb2.EmbedResponse) -> Embeddings:
    vectors = np.array([each.values for each in response.embeddings], np.float32)
    return Embeddings(vectors, usage_from_proto(response.usage))


def completion_from_proto(response: inference_pb2.GenerateOnceResponse) -> Completion:
    outputs = tuple(
        Output(
            text=output.text,
            token_ids=tuple(output.token_ids),
            logprobs=tuple(map(logprob_from_proto, output.logprobs)),
            finished=finished_from_proto(output.finished),
        )
        for output in response.outputs
    )
    prompt = prompt_scores_from_proto(response.prompt) if response.HasField("prompt") else None
    return Completion(response.request_id, outputs, usage_from_proto(response.usage), prompt)


def completion_from_events(request_id: str, events: Sequence[Event]) -> Completion:
    """Combine all events of one request into the same object that `GenerateOnce` would give.

    Raises QuireError if an output failed.
    """
    deltas: dict[int, list[OutputDelta]] = {}
    ends: dict[int, OutputFinished] = {}
    usage, prompt = Usage(0, 0, 0), None
    for event in events:
        match event:
            case OutputDelta():
                deltas.setdefault(event.output_index, []).append(event)
            case OutputFinished():
                if event.error is not None:
                    raise QuireError(event.error.message)
                ends[event.output_index] = event
            case PromptScores():
                prompt = event
            case Usage():
                usage = event
    outputs = tuple(
        Output(
            text="".join(delta.text for delta in deltas.get(index, ())),
            token_ids=tuple(token for delta in deltas.get(index, ()) for token in delta.token_ids),
            logprobs=tuple(item for delta in deltas.get(index, ()) for item in delta.logprobs),
            finished=ends[index],
        )
        for index in sorted(ends)
    )
    return Completion(request_id, outputs, usage, prompt)


def models_from_proto(response: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(map(model_from_proto, response.models))

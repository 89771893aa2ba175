"""The client's end of `quire.v1.InferenceService`: its values to protos and back."""

import json
from collections.abc import Sequence

from contract.errors import InvalidArgumentError, QuireError
from quire.client.types import (
    BeamSearch,
    ChatMessage,
    Completion,
    Event,
    FinishReason,
    GenerateOptions,
    Load,
    Model,
    Output,
    OutputDelta,
    OutputError,
    OutputFinished,
    PromptScores,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from quire.v1 import common_pb2, inference_pb2

_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_DEADLINE: FinishReason.DEADLINE,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


_EARLY_STOPPING: dict[bool | str, common_pb2.EarlyStopping] = {
    False: common_pb2.EARLY_STOPPING_HEURISTIC,
    True: common_pb2.EARLY_STOPPING_WHEN_FULL,
    "never": common_pb2.EARLY_STOPPING_NEVER,
}


def generate_request_to_proto(
    prompt: str | Sequence[int], sampling: SamplingParams, options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """Make a request of a prompt, text or token ids."""
    others = {name: value for name, value in options.items() if name != "beam"}
    request = inference_pb2.GenerateRequest(sampling=sampling_to_proto(sampling), **others)  # type: ignore[arg-type]
    if (beam := options.get("beam")) is not None:
        request.beam.CopyFrom(beam_to_proto(beam))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))
    return request


def beam_to_proto(beam: BeamSearch) -> common_pb2.BeamSearch:
    """Take the words of `transformers` for when a search stops."""
    return common_pb2.BeamSearch(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=_EARLY_STOPPING[beam.early_stopping],
    )


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Leave out what is None, so that the service's default holds."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured=(
            None if sampling.structured is None else structured_to_proto(sampling.structured)
        ),
    )


def structured_to_proto(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    """Raise InvalidArgumentError unless exactly one form is set."""
    schema = structured.json_schema
    if schema is not None and not isinstance(schema, str):
        schema = json.dumps(schema)
    forms = {
        "json_schema": schema,
        "json_object": structured.json_object or None,
        "regex": structured.regex,
        "choice": common_pb2.Choice(texts=structured.choice) if structured.choice else None,
        "grammar": structured.grammar,
    }
    given = [name for name, value in forms.items() if value is not None]
    if len(given) != 1:
        raise InvalidArgumentError(
            "structured", f"sets {', '.join(given) or 'nothing'}; it must set exactly one form"
        )
    message: common_pb2.StructuredOutput = common_pb2.StructuredOutput(**forms)  # type: ignore[arg-type]
    return message


def precedence_to_metadata(priority: int, tenant: str) -> list[tuple[str, str]]:
    """Leave out what is the default. Raise InvalidArgumentError for what no metadata can carry."""
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
    """Leave out an empty one. Raise InvalidArgumentError for what no metadata can carry."""
    if not (api_key.isascii() and api_key.isprintable()):  # the error does not show it
        raise InvalidArgumentError("api_key", "must have printable ASCII characters only")
    return [("authorization", f"Bearer {api_key}")] if api_key else []


def tokenize_request_to_proto(
    text_or_chat: str | Sequence[ChatMessage], model: str, *, add_special_tokens: bool
) -> inference_pb2.TokenizeRequest:
    """Make a request of a text or a chat."""
    request = inference_pb2.TokenizeRequest(model=model)
    if isinstance(text_or_chat, str):
        request.text = text_or_chat
        request.add_special_tokens = add_special_tokens
    else:
        request.chat.SetInParent()
        for message in text_or_chat:
            request.chat.messages.add(role=message.role, content=message.content)
    return request


def event_from_proto(response: inference_pb2.GenerateResponse) -> Event:
    """Raise ValueError for an event of a kind that this client does not know."""
    match response.WhichOneof("event"):
        case "delta":
            delta = response.delta
            return OutputDelta(
                output_index=delta.output_index,
                token_offset=delta.token_offset,
                token_ids=tuple(delta.token_ids),
                text=delta.text,
                logprobs=tuple(map(logprob_from_proto, delta.logprobs)),
            )
        case "finished":
            return finished_from_proto(response.finished)
        case "usage":
            return usage_from_proto(response.usage)
        case "prompt":
            return prompt_scores_from_proto(response.prompt)
        case kind:
            raise ValueError(f"event is {kind}; this client knows prompt, delta, finished, usage")


def prompt_scores_from_proto(scores: inference_pb2.PromptScores) -> PromptScores:
    """Take what the model makes of the prompt."""
    return PromptScores(tuple(map(logprob_from_proto, scores.logprobs)))


def completion_from_proto(response: inference_pb2.GenerateOnceResponse) -> Completion:
    """Take a complete answer."""
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
    """Put the events of a stream together, as `GenerateOnce` does.

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


def finished_from_proto(finished: inference_pb2.OutputFinished) -> OutputFinished:
    """Take the end of one output; a reason that is not known is an error."""
    stopped_by = finished.WhichOneof("stopped_by")
    error = None
    if finished.HasField("error"):
        error = OutputError(finished.error.code, finished.error.message, finished.error.retryable)
    return OutputFinished(
        output_index=finished.output_index,
        finish_reason=_REASONS.get(finished.finish_reason, FinishReason.ERROR),
        stop_string=finished.stop_string if stopped_by == "stop_string" else None,
        stop_token_id=finished.stop_token_id if stopped_by == "stop_token_id" else None,
        error=error,
        cumulative_logprob=(
            finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None
        ),
    )


def logprob_from_proto(logprob: common_pb2.TokenLogprob) -> TokenLogprob:
    """Pair the likeliest tokens with their log-probabilities."""
    top = zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
    return TokenLogprob(logprob.logprob, tuple(top))


def usage_from_proto(usage: inference_pb2.Usage) -> Usage:
    """Take what a request cost."""
    return Usage(
        usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.pinned_tokens
    )


def models_from_proto(response: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """Take the models served."""
    return tuple(
        Model(
            model.id,
            model.max_model_len,
            model.vocab_size,
            tuple(model.eos_token_ids),
            model.structured_output,
            model.parent,
        )
        for model in response.models
    )


def load_from_proto(load: common_pb2.Load) -> Load:
    """Take the load."""
    return Load(
        num_requests_running=load.num_requests_running,
        num_requests_waiting=load.num_requests_waiting,
        max_num_seqs=load.max_num_seqs,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        block_size=load.block_size,
        num_workers=load.num_workers,
        num_requests_swapped=load.num_requests_swapped,
        num_host_blocks=load.num_host_blocks,
        num_free_host_blocks=load.num_free_host_blocks,
        num_cached_host_blocks=load.num_cached_host_blocks,
        num_pinned_blocks=load.num_pinned_blocks,
        num_moved_blocks=load.num_moved_blocks,
        num_prefix_cache_queries=load.num_prefix_cache_queries,
        num_prefix_cache_hits=load.num_prefix_cache_hits,
        fragmentation=load.fragmentation,
        host_fragmentation=load.host_fragmentation,
        num_slots_held=load.num_slots_held,
        num_slots_written=load.num_slots_written,
        num_disk_blocks=load.num_disk_blocks,
        num_free_disk_blocks=load.num_free_disk_blocks,
        num_cached_disk_blocks=load.num_cached_disk_blocks,
        num_swapped_out_blocks=load.num_swapped_out_blocks,
        num_swapped_in_blocks=load.num_swapped_in_blocks,
        num_stored_blocks=load.num_stored_blocks,
        num_loaded_blocks=load.num_loaded_blocks,
        num_unloaded_workers=load.num_unloaded_workers,
    )

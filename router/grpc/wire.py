"""Messages of the public contract to domain values and back."""

from typing import Final

from contract.errors import InvalidArgumentError
from quire.v1 import common_pb2, inference_pb2
from router.domain import (
    BeamSearch,
    EarlyStopping,
    Event,
    FinishReason,
    GenerateRequest,
    Load,
    LoraAdapter,
    ModelInfo,
    OutputDelta,
    OutputError,
    OutputFinished,
    OutputReceived,
    PromptScores,
    ResumeRequest,
    SamplingParams,
    StructuredForm,
    StructuredOutput,
    TokenLogprob,
    Usage,
)

FINISH_REASON_TO_PROTO: Final = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}

_EARLY_STOPPING_TO_PROTO: Final = {
    EarlyStopping.HEURISTIC: common_pb2.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.WHEN_FULL: common_pb2.EARLY_STOPPING_WHEN_FULL,
    EarlyStopping.NEVER: common_pb2.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_FROM_PROTO: Final = {
    common_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{proto: domain for domain, proto in _EARLY_STOPPING_TO_PROTO.items()},
}


def resume_request_from_proto(
    message: inference_pb2.ResumeRequest, tenant: str, deadline: float | None
) -> ResumeRequest:
    """Reads a request for the rest of a stream; raises InvalidArgumentError without an id."""
    if not message.request_id:
        raise InvalidArgumentError("request_id", "is empty; it must name the request to resume")
    return ResumeRequest(
        request_id=message.request_id,
        tenant=tenant,
        received={
            part.output_index: OutputReceived(part.num_tokens, part.num_text_bytes, part.finished)
            for part in message.received
        },
        has_prompt_scores=message.has_prompt_scores,
        deadline=deadline,
    )


def generate_request_from_proto(
    message: inference_pb2.GenerateRequest, deadline: float | None
) -> GenerateRequest:
    """Reads a request; raises InvalidArgumentError if it has no prompt, or an unknown enum."""
    if message.sampling.HasField("adapter"):
        raise InvalidArgumentError("sampling.adapter", "is set; name the adapter in model")
    match message.WhichOneof("prompt"):
        case "text":
            prompt: str | tuple[int, ...] = message.text
        case "token_ids":
            prompt = tuple(message.token_ids.ids)
        case _:
            raise InvalidArgumentError("prompt", "is not set; text or token_ids must be")
    return GenerateRequest(
        prompt=prompt,
        model=message.model,
        request_id=message.request_id,
        sampling=sampling_from_proto(message.sampling),
        stop=tuple(message.stop),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=(
            message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        ),
        n=message.n if message.HasField("n") else 1,
        beam=beam_from_proto(message.beam) if message.HasField("beam") else None,
        cache_salt=message.cache_salt,
        cache_pin_s=message.cache_pin_s if message.HasField("cache_pin_s") else None,
        deadline=deadline,
        resumable=message.resumable,
    )


def beam_from_proto(message: common_pb2.BeamSearch) -> BeamSearch:
    """Reads a search; raises InvalidArgumentError for an enum that is not known."""
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
    """Writes what a request says of its search."""
    return common_pb2.BeamSearch(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=_EARLY_STOPPING_TO_PROTO[beam.early_stopping],
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Reads sampling parameters; what is not set has its default."""

    def given(field: str) -> bool:
        return message.HasField(field)

    return SamplingParams(
        temperature=message.temperature if given("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if given("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if given("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed if given("seed") else None,
        logit_bias=dict(message.logit_bias),
        max_tokens=message.max_tokens if given("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if given("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if given("prompt_logprobs") else None,
        structured=_structured_from_proto(message.structured) if given("structured") else None,
        adapter=adapter_from_proto(message.adapter) if given("adapter") else None,
    )


def adapter_from_proto(message: common_pb2.LoraAdapter) -> LoraAdapter:
    """Reads what an adapter is known by, and where it is."""
    return LoraAdapter(message.name, message.digest, message.directory)


def _adapter_to_proto(adapter: LoraAdapter) -> common_pb2.LoraAdapter:
    return common_pb2.LoraAdapter(name=adapter.name, digest=adapter.digest)


def _structured_from_proto(message: common_pb2.StructuredOutput) -> StructuredOutput:
    name = message.WhichOneof("form")
    match name:
        case None:
            raise InvalidArgumentError(
                "sampling.structured", "is empty; one of its fields must be set"
            )
        case "json_object":
            if not message.json_object:
                raise InvalidArgumentError("sampling.structured.json_object", "is false; unset it")
            return StructuredOutput(StructuredForm.JSON_OBJECT)
        case "choice":
            return StructuredOutput(StructuredForm.CHOICE, tuple(message.choice.texts))
        case _:
            return StructuredOutput(StructuredForm(name), (getattr(message, name),))


def _structured_to_proto(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    match structured.form:
        case StructuredForm.JSON_OBJECT:
            return common_pb2.StructuredOutput(json_object=True)
        case StructuredForm.CHOICE:
            return common_pb2.StructuredOutput(choice=common_pb2.Choice(texts=structured.texts))
        case _:
            message = common_pb2.StructuredOutput()
            setattr(message, structured.form.value, structured.texts[0])
            return message


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Writes sampling parameters."""
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
            None if sampling.structured is None else _structured_to_proto(sampling.structured)
        ),
        adapter=None if sampling.adapter is None else _adapter_to_proto(sampling.adapter),
    )


def event_to_proto(request_id: str, event: Event) -> inference_pb2.GenerateResponse:
    """Writes one event of a stream."""
    match event:
        case OutputDelta():
            return inference_pb2.GenerateResponse(
                request_id=request_id,
                delta=inference_pb2.OutputDelta(
                    output_index=event.output_index,
                    token_offset=event.token_offset,
                    token_ids=event.token_ids,
                    text=event.text,
                    logprobs=map(logprob_to_proto, event.logprobs),
                ),
            )
        case OutputFinished():
            return inference_pb2.GenerateResponse(
                request_id=request_id, finished=finished_to_proto(event)
            )
        case Usage():
            return inference_pb2.GenerateResponse(
                request_id=request_id, usage=usage_to_proto(event)
            )
        case PromptScores():
            return inference_pb2.GenerateResponse(
                request_id=request_id, prompt=prompt_scores_to_proto(event)
            )


def prompt_scores_to_proto(scores: PromptScores) -> inference_pb2.PromptScores:
    """Writes what the model makes of the prompt."""
    return inference_pb2.PromptScores(logprobs=map(logprob_to_proto, scores.logprobs))


def finished_to_proto(finished: OutputFinished) -> inference_pb2.OutputFinished:
    """Writes the end of one output."""
    error = finished.error
    return inference_pb2.OutputFinished(
        output_index=finished.output_index,
        finish_reason=FINISH_REASON_TO_PROTO[finished.reason],
        stop_string=finished.stop_string,
        stop_token_id=finished.stop_token_id,
        error=None if error is None else error_to_proto(error),
        cumulative_logprob=finished.cumulative_logprob,
    )


def error_to_proto(error: OutputError) -> common_pb2.OutputError:
    """Writes a failure."""
    return common_pb2.OutputError(code=error.code, message=error.message, retryable=error.retryable)


def usage_to_proto(usage: Usage) -> inference_pb2.Usage:
    """Writes what a request cost."""
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        pinned_tokens=usage.pinned_tokens,
    )


def logprob_to_proto(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    """Writes the log-probability of a token."""
    return common_pb2.TokenLogprob(
        logprob=logprob.logprob,
        top_token_ids=[token_id for token_id, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def logprob_from_proto(message: common_pb2.TokenLogprob) -> TokenLogprob:
    """Reads the log-probability of a token; raises InvalidArgumentError for lopsided lists."""
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InvalidArgumentError(
            "logprob.top_logprobs",
            f"has {len(message.top_logprobs)} entries; it must have {len(message.top_token_ids)}",
        )
    return TokenLogprob(
        message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )


def model_to_proto(model: ModelInfo) -> common_pb2.ModelInfo:
    """Writes a model."""
    return common_pb2.ModelInfo(
        id=model.id,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        structured_output=model.structured_output,
        parent=model.parent,
    )


def load_from_proto(message: common_pb2.Load) -> Load:
    """Reads a scheduler's load."""
    return Load(
        num_requests_running=message.num_requests_running,
        num_requests_waiting=message.num_requests_waiting,
        max_num_seqs=message.max_num_seqs,
        num_blocks=message.num_blocks,
        num_free_blocks=message.num_free_blocks,
        num_cached_blocks=message.num_cached_blocks,
        block_size=message.block_size,
        num_workers=message.num_workers,
        num_requests_swapped=message.num_requests_swapped,
        num_host_blocks=message.num_host_blocks,
        num_free_host_blocks=message.num_free_host_blocks,
        num_cached_host_blocks=message.num_cached_host_blocks,
        num_swapped_out_blocks=message.num_swapped_out_blocks,
        num_swapped_in_blocks=message.num_swapped_in_blocks,
        num_demoted_blocks=message.num_demoted_blocks,
        num_promoted_blocks=message.num_promoted_blocks,
        num_pinned_blocks=message.num_pinned_blocks,
        num_moved_blocks=message.num_moved_blocks,
        num_prefix_cache_queries=message.num_prefix_cache_queries,
        num_prefix_cache_hits=message.num_prefix_cache_hits,
        fragmentation=message.fragmentation,
        host_fragmentation=message.host_fragmentation,
        num_slots_held=message.num_slots_held,
        num_slots_written=message.num_slots_written,
        num_disk_blocks=message.num_disk_blocks,
        num_free_disk_blocks=message.num_free_disk_blocks,
        num_cached_disk_blocks=message.num_cached_disk_blocks,
        num_stored_blocks=message.num_stored_blocks,
        num_loaded_blocks=message.num_loaded_blocks,
        num_failed_disk_moves=message.num_failed_disk_moves,
        num_spilled_blocks=message.num_spilled_blocks,
        num_unloaded_workers=message.num_unloaded_workers,
    )


def load_to_proto(load: Load) -> common_pb2.Load:
    """Writes a scheduler's load."""
    return common_pb2.Load(
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
        num_swapped_out_blocks=load.num_swapped_out_blocks,
        num_swapped_in_blocks=load.num_swapped_in_blocks,
        num_demoted_blocks=load.num_demoted_blocks,
        num_promoted_blocks=load.num_promoted_blocks,
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
        num_stored_blocks=load.num_stored_blocks,
        num_loaded_blocks=load.num_loaded_blocks,
        num_failed_disk_moves=load.num_failed_disk_moves,
        num_spilled_blocks=load.num_spilled_blocks,
        num_unloaded_workers=load.num_unloaded_workers,
    )

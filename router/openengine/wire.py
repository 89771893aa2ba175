"""Converts messages of `openengine.v1` to Quire's data types and back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import grpc

from contract.errors import InvalidArgumentError, QuireError, UnimplementedError
from contract.outputs import FinishReason, OutputFinished, TokenLogprob, Usage
from contract.request import GenerateRequest
from contract.sampling import SamplingParams, StructuredOutput
from quire.openengine import openengine_pb2 as pb
from quire.vllm_engine import smg_common_pb2
from router.access.tenancy import PRIORITY_KEY

_RANK_KEY: Final = "openengine-target-dp-rank"
_PRIORITY_KEY: Final = "openengine-priority"
_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: pb.ERROR_CODE_INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED: pb.ERROR_CODE_UNSUPPORTED_FEATURE,
    grpc.StatusCode.NOT_FOUND: pb.ERROR_CODE_MODEL_NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: pb.ERROR_CODE_OVERLOADED,
    grpc.StatusCode.ALREADY_EXISTS: pb.ERROR_CODE_DUPLICATE_REQUEST,
    grpc.StatusCode.ABORTED: pb.ERROR_CODE_CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: pb.ERROR_CODE_CANCELLED,
    grpc.StatusCode.UNAVAILABLE: pb.ERROR_CODE_DRAINING,
}


def metadata_from_call(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a call's metadata, with the value of OpenEngine's priority key copied to Quire's key.

    Raises InvalidArgumentError if the metadata name a data-parallel rank other than 0.
    """
    if (rank := metadata.get(_RANK_KEY, "0")) != "0":
        raise InvalidArgumentError(_RANK_KEY, f"is {rank[:64]!r}; a cell has only rank 0")
    found = dict(metadata)
    if (priority := metadata.get(_PRIORITY_KEY)) is not None:
        found[PRIORITY_KEY] = priority
    return found


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Parse a request.

    Raises:
        InvalidArgumentError: A value is invalid.
        UnimplementedError: A field is set that Quire does not support.
    """
    _refuse(message, "media", "lora_name")
    _refuse(message.kv, "session", prefix="kv.")
    if message.kv.bypass_prefix_cache:
        raise UnimplementedError("kv.bypass_prefix_cache is true; it is not supported")
    match message.WhichOneof("input"):
        case "prompt":
            prompt: str | tuple[int, ...] = message.prompt
        case "token_ids":
            prompt = tuple(message.token_ids.ids)
        case _:
            raise InvalidArgumentError("input", "is not set; set prompt or token_ids")
    sampling, conditions = message.sampling, message.stopping.conditions
    for i, condition in enumerate(conditions):
        if condition.WhichOneof("condition") is None:
            raise InvalidArgumentError(
                f"stopping.conditions[{i}]", "is not set; set stop_text or stop_token_id"
            )
    n = sampling.num_sequences if sampling.HasField("num_sequences") else 1
    return GenerateRequest(
        prompt=prompt,
        model=message.model,
        request_id=message.request_id,
        sampling=_sampling(message),
        stop=tuple(c.stop_text for c in conditions if c.HasField("stop_text")),
        include_stop_str_in_output=message.stopping.include_stop_in_output,
        n=n,
        cache_salt=message.kv.cache_salt,
    )


def stop_token_ids(message: pb.GenerateRequest) -> tuple[int, ...]:
    """Return the tokens at which the caller wants outputs to end."""
    conditions = message.stopping.conditions
    return tuple(c.stop_token_id for c in conditions if c.HasField("stop_token_id"))


def _sampling(message: pb.GenerateRequest) -> SamplingParams:
    sampling, stopping, response = message.sampling, message.stopping, message.response
    if response.prompt_logprob_start:
        raise UnimplementedError("response.prompt_logprob_start must be 0")
    given = {
        name: getattr(sampling, name)
        for name in (
            *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"),
            *("repetition_penalty", "seed"),
        )
        if sampling.HasField(name)
    }
    given |= {
        name: getattr(stopping, name)
        for name in ("max_tokens", "min_tokens", "ignore_eos")
        if stopping.HasField(name)
    }
    return SamplingParams(
        **given,
        top_k=0 if sampling.top_k == -1 else sampling.top_k,
        stop_token_ids=stop_token_ids(message),
        logprobs=_num_logprobs(response, "output"),
        prompt_logprobs=_num_logprobs(response, "prompt"),
        structured=_structured(message.guided),
    )


def _num_logprobs(response: pb.ResponseOptions, which: str) -> int | None:
    field = f"{which}_candidates"
    candidates: pb.CandidateTokenSelection = getattr(response, field)
    _refuse(candidates, "token_ids", "all", prefix=f"response.{field}.")
    if response.HasField(field) or getattr(response, f"return_{which}_logprobs"):
        return candidates.top_n
    return None


def _structured(guided: pb.GuidedDecoding) -> StructuredOutput | None:
    if guided.backend not in ("", "llguidance"):
        raise UnimplementedError(
            f"guided.backend is {guided.backend[:64]!r}; only llguidance is supported"
        )
    match guided.WhichOneof("guide"):
        case "json_schema":
            return StructuredOutput(json_schema=guided.json_schema)
        case "regex":
            return StructuredOutput(regex=guided.regex)
        case "ebnf_grammar":
            return StructuredOutput(grammar=guided.ebnf_grammar)
        case "choice":
            return StructuredOutput(choice=tuple(guided.choice.choices))
        case "json_object":
            return StructuredOutput(json_object=True)
        case "structural_tag":
            raise UnimplementedError("guided.structural_tag is set; it is not supported")
        case _:
            return None


def _refuse(
    message: pb.GenerateRequest | pb.KvOptions | pb.CandidateTokenSelection,
    *names: str,
    prefix: str = "",
) -> None:
    given = {field.name for field, _ in message.ListFields()}
    for name in names:
        if name in given:
            raise UnimplementedError(f"{prefix}{name} is set; it is not supported")


def tokens_to_proto(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> Iterator[pb.TokenInfo]:
    """Describe tokens; `logprobs` has an entry for each token, or is empty."""
    for index, token_id in enumerate(token_ids):
        scores = logprobs[index] if logprobs else None
        if scores is None:
            yield pb.TokenInfo(token_id=token_id)
            continue
        candidates = [pb.LogProb(token_id=each, logprob=value) for each, value in scores.top]
        yield pb.TokenInfo(token_id=token_id, logprob=scores.logprob, candidates=candidates)


def finished_to_proto(finished: OutputFinished, end_token_id: int | None) -> pb.GenerationFinished:
    """Describe a successful output's end; `end_token_id` is its end-of-text token, if any."""
    message = pb.GenerationFinished(output_index=finished.output_index)
    if finished.finish_reason is FinishReason.LENGTH:
        message.reason = pb.FINISH_REASON_LENGTH
        return message
    message.reason = pb.FINISH_REASON_STOP
    if finished.stop_string is not None:
        message.stop_match.stop_text = finished.stop_string
    elif finished.stop_token_id is not None:
        message.stop_match.stop_token_id = finished.stop_token_id
    elif end_token_id is not None:
        message.stop_match.eos_token_id = end_token_id
    return message


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_prompt_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def error_to_proto(error: QuireError) -> pb.EngineError:
    return pb.EngineError(
        code=_CODES.get(error.code, pb.ERROR_CODE_INTERNAL),
        message=str(error),
        retryable=error.retryable,
    )


def kv_batch_to_proto(batch: smg_common_pb2.KvEventBatch) -> pb.KvEventBatch:
    """Convert prefix cache events of the vLLM engine API (`smg_common`) to OpenEngine's events."""
    message = pb.KvEventBatch(
        sequence_number=batch.sequence_number, timestamp_unix_nanos=int(batch.timestamp * 1e9)
    )
    for event in batch.events:
        match event.WhichOneof("data"):
            case "stored":
                run = message.events.add().block_stored
                run.block_size = event.stored.blocks[0].block_size
                run.lora_name = event.stored.lora_name
                if event.stored.HasField("parent_block_hash"):
                    run.parent_block_hash.CopyFrom(_hash(event.stored.parent_block_hash))
                for block in event.stored.blocks:
                    run.block_hashes.append(_hash(block.block_hash))
                    run.token_ids.extend(block.token_ids)
            case "removed":
                hashes = map(_hash, event.removed.block_hashes)
                message.events.add().block_removed.block_hashes.extend(hashes)
            case "cleared":
                message.events.add().all_blocks_cleared.SetInParent()
    return message


def _hash(number: int) -> pb.KvBlockHash:
    return pb.KvBlockHash(value=number.to_bytes(8, "big", signed=True), encoding="bytes")

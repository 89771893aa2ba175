"""Converts messages of `vllm.grpc.engine` to values and back."""

from collections.abc import Sequence
from typing import Final

from contract.errors import InvalidArgumentError
from contract.outputs import FinishReason, OutputFinished, TokenLogprob
from contract.request import GenerateRequest
from contract.sampling import SamplingParams, StructuredOutput
from quire.vllm_engine import vllm_engine_pb2 as pb

_REFUSED: Final = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "media_refs",
    "extra_mm_inputs",
)


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    """Parse a request; raises InvalidArgumentError for a field that Quire does not support."""
    given = {field.name for field, _ in message.ListFields()}
    for name in _REFUSED:
        if name in given:
            raise InvalidArgumentError(name, "is set; it is not supported")
    if message.data_parallel_rank:
        raise InvalidArgumentError(
            "data_parallel_rank", f"is {message.data_parallel_rank}; a cell has only rank 0"
        )
    params = message.sampling_params
    return GenerateRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        sampling=_sampling(params),
        stop=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        n=params.n or 1,
        truncate_prompt_tokens=(
            params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
        ),
    )


def _prompt(message: pb.GenerateRequest) -> str | tuple[int, ...]:
    match message.WhichOneof("input"):
        case "tokenized":
            return tuple(message.tokenized.input_ids)
        case "text":
            return message.text
        case _:
            raise InvalidArgumentError("input", "is not set; set tokenized or text")


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    default = SamplingParams()

    def optional(name: str) -> int | None:
        value: int = getattr(params, name)
        return value if params.HasField(name) else None

    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else default.temperature,
        top_p=params.top_p or default.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or default.repetition_penalty,
        max_tokens=optional("max_tokens"),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=optional("logprobs"),
        prompt_logprobs=optional("prompt_logprobs"),
        seed=optional("seed"),
        logit_bias=dict(params.logit_bias),
        structured=_structured(params),
    )


def _structured(params: pb.SamplingParams) -> StructuredOutput | None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            return StructuredOutput(json_schema=params.json_schema)
        case "regex":
            return StructuredOutput(regex=params.regex)
        case "grammar":
            return StructuredOutput(grammar=params.grammar)
        case "choice":
            return StructuredOutput(choice=tuple(params.choice.choices))
        case "json_object" if params.json_object:
            return StructuredOutput(json_object=True)
        case "structural_tag":
            raise InvalidArgumentError("structural_tag", "is set; it is not supported")
        case _:
            return None


def output_logprobs_to_proto(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> pb.OutputLogProbs | None:
    """Convert the log-probabilities of an output's tokens; return None if there are none."""
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs],
        token_ids=token_ids,
        top_logprobs=_top_to_proto(logprobs),
    )


def input_logprobs_to_proto(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> pb.InputLogProbs:
    """Convert the prompt's log-probabilities; `logprobs` has no entry for the first token."""
    values = [pb.InputTokenLogProb(value=each.logprob) for each in logprobs]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *values],
        token_ids=prompt,
        top_logprobs=[pb.TopLogProbs(), *_top_to_proto(logprobs)],
    )


def _top_to_proto(logprobs: Sequence[TokenLogprob]) -> list[pb.TopLogProbs]:
    if not any(each.top for each in logprobs):
        return []
    return [
        pb.TopLogProbs(
            token_ids=[token_id for token_id, _ in each.top],
            values=[value for _, value in each.top],
        )
        for each in logprobs
    ]


def complete_to_proto(
    finished: OutputFinished, counts: pb.GenerateStreamChunk
) -> pb.GenerateComplete:
    """Make the message for the end of an output that has not failed.

    `counts` has the token ids, numbers of tokens and log-probabilities that the message gets.
    """
    complete = pb.GenerateComplete(
        output_ids=counts.token_ids,
        finish_reason="length" if finished.finish_reason is FinishReason.LENGTH else "stop",
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        cached_tokens=counts.cached_tokens,
        index=counts.index,
    )
    if counts.HasField("output_logprobs"):
        complete.output_logprobs.CopyFrom(counts.output_logprobs)
    if counts.HasField("input_logprobs"):
        complete.input_logprobs.CopyFrom(counts.input_logprobs)
    if finished.stop_string is not None:
        complete.matched_stop_str = finished.stop_string
    elif finished.stop_token_id is not None:
        complete.matched_token_id = finished.stop_token_id
    return complete

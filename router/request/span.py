"""Attributes of the `request` span: names, sizes and parameters, but never a request's text.

The names follow OpenTelemetry's conventions, except that latencies have vLLM's names.
"""

from opentelemetry.util.types import AttributeValue

from router.live.live_request import LiveRequest


def submitted(live: LiveRequest) -> dict[str, AttributeValue]:
    """Return a submitted request's attributes; most attributes with default values are left out."""
    record, sampling = live.record, live.record.sampling
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.id": live.request_id,
        "gen_ai.request.model": live.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.choice.count": len(live.outputs) if len(live.outputs) > 1 else None,
        "gen_ai.usage.input_tokens": len(live.prompt_token_ids),
        "quire.priority": record.priority or None,
        "quire.beam_width": record.beam.width if record.beam is not None else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def closed(live: LiveRequest) -> dict[str, AttributeValue]:
    """Return the attributes of the outputs, after the reader has finished or left."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.model": live.model,
        "gen_ai.response.finish_reasons": live.finish_reasons,
        "gen_ai.usage.output_tokens": live.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": live.num_cached_tokens or 0,
    }
    if (first_token_s := live.time_to_first_token_s) is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first_token_s
    return attributes

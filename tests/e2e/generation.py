"""Makes requests, reads their streams to the end, and checks them against the contract."""

from collections.abc import AsyncIterable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import common_pb2, inference_pb2


@dataclass
class Result:
    """The outputs of one request."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, inference_pb2.OutputFinished] = field(default_factory=dict)
    usage: inference_pb2.Usage | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Adds an event; fails if it breaks the contract."""
        assert self.usage is None, "an event after the usage"
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                index = delta.output_index
                assert index not in self.finished, "a delta after the end"
                token_ids = self.token_ids.setdefault(index, [])
                assert delta.token_offset == len(token_ids), "a gap or a repeat"
                token_ids.extend(delta.token_ids)
                self.text[index] = self.text.get(index, "") + delta.text
            case "finished":
                index = response.finished.output_index
                assert index not in self.finished, "a second end"
                self.finished[index] = response.finished
            case "usage":
                self.usage = response.usage
                num_tokens = sum(map(len, self.token_ids.values()))
                assert self.usage.completion_tokens == num_tokens
            case other:
                raise AssertionError(f"event {other}")

    @property
    def outputs(self) -> list[list[int]]:
        """The token ids of each output; fails unless all have ended without an error."""
        assert self.usage is not None, "the stream ended without usage"
        good = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
        for finished in self.finished.values():
            assert finished.finish_reason in good, str(finished)
        return [self.token_ids[index] for index in sorted(self.finished)]


def generate_request(
    prompt: Sequence[int] | str,
    *,
    n: int | None = None,
    stop: Sequence[str] = (),
    beam: common_pb2.BeamSearch | None = None,
    cache_salt: str = "",
    **sampling: Any,
) -> inference_pb2.GenerateRequest:
    """A request; greedy unless it has a temperature."""
    request = inference_pb2.GenerateRequest(
        sampling=common_pb2.SamplingParams(**{"temperature": 0.0, **sampling}),
        n=n,
        stop=stop,
        beam=beam,
        cache_salt=cache_salt,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def read(stream: Iterable[inference_pb2.GenerateResponse]) -> Result:
    """Reads a stream to its end."""
    result = Result()
    for response in stream:
        result.add(response)
    return result


async def read_aio(stream: AsyncIterable[inference_pb2.GenerateResponse]) -> Result:
    """Reads a stream to its end."""
    result = Result()
    async for response in stream:
        result.add(response)
    return result

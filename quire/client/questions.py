"""What a client asks besides generating: the call, its request, and what the answer says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.client import activity_wire, kv_wire, wire
from quire.client.activity_types import WorkerActivity
from quire.client.kv_types import WorkerKv
from quire.client.types import ChatMessage, Load, Model
from quire.v1 import common_pb2, inference_pb2, kv_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """One unary call of `InferenceService`."""

    method: str
    request: Any
    """The method's request message."""
    read: Callable[[Any], T]
    """Makes what is wanted of the response message."""


def tokenize(
    text_or_chat: str | Sequence[ChatMessage], model: str, *, add_special_tokens: bool
) -> Question[tuple[int, ...]]:
    """Ask for the token ids of a text or a chat."""
    request = wire.tokenize_request_to_proto(
        text_or_chat, model, add_special_tokens=add_special_tokens
    )
    return Question("Tokenize", request, lambda response: tuple(response.token_ids))


def detokenize(token_ids: Sequence[int], model: str, *, skip_special_tokens: bool) -> Question[str]:
    """Ask for the text of some token ids."""
    request = inference_pb2.DetokenizeRequest(
        model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )
    return Question("Detokenize", request, lambda response: str(response.text))


def models() -> Question[tuple[Model, ...]]:
    """Ask for the models served."""
    return Question("ListModels", inference_pb2.ListModelsRequest(), wire.models_from_proto)


def describe_kv(
    worker: str,
    first_seq_id: int,
    max_sequences: int | None,
    first_block: int,
    max_blocks: int | None,
    *,
    ref_counts: bool,
    block_tables: bool,
) -> Question[tuple[WorkerKv, ...]]:
    """Ask who holds which KV blocks."""
    query = kv_pb2.KvQuery(
        worker=worker,
        first_seq_id=first_seq_id,
        max_sequences=max_sequences,
        first_block=first_block,
        max_blocks=max_blocks,
        ref_counts=ref_counts,
        block_tables=block_tables,
    )
    request = inference_pb2.DescribeKvRequest(query=query)
    return Question("DescribeKv", request, kv_wire.workers_kv_from_proto)


def describe_activity(
    worker: str, max_steps: int | None, after_step_id: int
) -> Question[tuple[WorkerActivity, ...]]:
    """Ask what the workers are doing."""
    query = common_pb2.ActivityQuery(
        worker=worker, max_steps=max_steps, after_step_id=after_step_id
    )
    request = inference_pb2.DescribeActivityRequest(query=query)
    return Question("DescribeActivity", request, activity_wire.activity_from_proto)


def load() -> Question[Load]:
    """Ask how busy the service is."""
    return Question(
        "GetLoad",
        inference_pb2.GetLoadRequest(),
        lambda response: wire.load_from_proto(response.load),
    )

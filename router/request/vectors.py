"""Computes embeddings of many inputs, or scores of pairs of texts, for every API."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np

from contract.arrays import Float32Array
from contract.errors import InvalidArgumentError, QuireError, TooBusyError
from contract.outputs import OutputFinished, Usage
from contract.pooling import Pooling, PoolingKind, Task
from contract.request import GenerateRequest, Model
from contract.sampling import SamplingParams
from router.request.inference import Inference
from router.schedulers.wire import failure_of

T = TypeVar("T")

MAX_INPUTS: Final = 2048
"""Limit on the inputs of one call, as in OpenAI's API."""
MAX_NUMBERS: Final = 2**22
"""Limit on the numbers in all embeddings of one call."""
MAX_AT_ONCE: Final = 64
"""Limit on the inputs of one call that are computed at once, to leave room for other calls."""


@dataclass(frozen=True, slots=True)
class Vector:
    """The embedding of one input."""

    values: Float32Array
    num_tokens: int
    """Tokens of the input, including special tokens."""


def pooling_of(
    model: Model,
    kind: PoolingKind | None = None,
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> Pooling:
    """Return the pooling for a request; an argument that is None takes the model's default."""
    default = model.abilities.pooling or Pooling(PoolingKind.LAST, normalize=True)
    return Pooling(
        default.kind if kind is None else kind,
        default.normalize if normalize is None else normalize,
        dimensions,
    )


def check_inputs(
    field: str,
    num_inputs: int,
    model: Model,
    dimensions: int | None,
    max_numbers: int = MAX_NUMBERS,
) -> None:
    """Check the number of inputs of a call; may raise InvalidArgumentError."""
    size = dimensions or model.abilities.embedding_size or 1
    most = min(MAX_INPUTS, max(1, max_numbers // size))
    if not 1 <= num_inputs <= most:
        raise InvalidArgumentError(
            field, f"has {num_inputs} entries; with vectors of size {size} it must have 1 to {most}"
        )


async def make_vectors(
    inference: Inference,
    requests: Sequence[GenerateRequest],
    pooling: Pooling,
    name: Callable[[int], str],
    pair_name: Callable[[int], str] = str,
    *,
    max_at_once: int = MAX_AT_ONCE,
) -> list[Vector]:
    """Compute an embedding for each request; the requests' `sampling` is ignored.

    At most `max_at_once` requests are live at a time. If the service is too busy before it has
    accepted any of the requests, the call fails. Once the service has accepted a request, each
    request for which the service is too busy is retried. If a request fails, the other requests are
    cancelled. In error messages, the `prompt` of request i is called `name(i)`, and the `pair` of
    request i is called `pair_name(i)`.
    """
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, pooling=pooling)
    vectors: list[Vector | None] = [None] * len(requests)
    left = iter(range(len(requests)))
    num_accepted = 0

    async def make_one(index: int) -> Vector:
        nonlocal num_accepted
        while True:
            try:
                live = await inference.generate(replace(requests[index], sampling=sampling))
            except TooBusyError as error:
                if not num_accepted:
                    raise
                await asyncio.sleep(error.retry_after_s)
                continue
            num_accepted += 1
            num_tokens = 0
            async with live:
                async for event in live:
                    if isinstance(event, OutputFinished):
                        if (failure := failure_of(event)) is not None:
                            raise failure
                    elif isinstance(event, Usage):
                        num_tokens = event.prompt_tokens
            if live.vector is None:
                raise QuireError("the worker sent no vector")
            return Vector(np.frombuffer(live.vector, "<f4"), num_tokens)

    async def work() -> None:
        for index in left:  # the tasks share this iterator
            try:
                vectors[index] = await make_one(index)
            except InvalidArgumentError as error:
                field, bracket, token = error.field.partition("[")
                if field not in ("prompt", "pair"):
                    raise
                shown = (name if field == "prompt" else pair_name)(index)
                raise type(error)(shown + bracket + token, error.problem) from error

    tasks = [asyncio.create_task(work()) for _ in range(min(max_at_once, len(requests)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [vector for vector in vectors if vector is not None]


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of pairs of texts."""

    values: list[float]
    num_tokens: int


async def score_pairs(
    inference: Inference,
    firsts: Sequence[GenerateRequest],
    seconds: Sequence[GenerateRequest],
    first_name: Callable[[int], str],
    second_name: Callable[[int], str],
) -> Scores:
    """Score each text of `seconds` with the text of `firsts` at the same index.

    If `firsts` has only one text, each text of `seconds` is scored with this text. In error
    messages, text i of `firsts` is called `first_name(i)`, and text i of `seconds` is called
    `second_name(i)`.

    If the model has a classification head, a pair's score is the logistic function of the head's
    output, in (0, 1). With other models, the score is the cosine of the two embeddings, in [-1, 1].
    """
    model = inference.model.info(seconds[0].model)
    num_firsts = len(firsts)
    if Task.SCORE in model.abilities.tasks:
        pairs = [
            replace(one, pair=two.prompt, request_id=two.request_id)
            for one, two in zip(_repeated(firsts, len(seconds)), seconds, strict=True)
            if isinstance(two.prompt, str)
        ]
        made = await make_vectors(
            inference,
            pairs,
            Pooling(PoolingKind.SCORE),
            lambda i: first_name(min(i, num_firsts - 1)),
            second_name,
        )
        return Scores([_logistic(float(each.values[0])) for each in made], _num_tokens(made))
    pooling = pooling_of(model, normalize=True)
    made = await make_vectors(
        inference,
        [*firsts, *seconds],
        pooling,
        lambda i: first_name(i) if i < num_firsts else second_name(i - num_firsts),
    )
    ones, twos = made[:num_firsts], made[num_firsts:]
    return Scores(
        [
            float(np.dot(one.values, two.values))
            for one, two in zip(_repeated(ones, len(twos)), twos, strict=True)
        ],
        _num_tokens(made),
    )


def _repeated(values: Sequence[T], count: int) -> Sequence[T]:
    return list(values) * count if len(values) == 1 else values


def _num_tokens(vectors: Sequence[Vector]) -> int:
    return sum(vector.num_tokens for vector in vectors)


def _logistic(value: float) -> float:
    if value < 0:  # avoids overflow of `exp`
        return math.exp(value) / (1 + math.exp(value))
    return 1 / (1 + math.exp(-value))

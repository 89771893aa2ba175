"""Each input becomes a request of one token; the answer has their vectors."""

import asyncio

import grpc
import pytest
from router_fake_scheduler import ERROR, LENGTH, FakeScheduler

from contract.errors import (
    ContextLengthError,
    InvalidArgumentError,
    QuireError,
    TooBusyError,
    UnimplementedError,
)
from contract.pooling import Pooling, PoolingKind
from contract.request import GenerateRequest
from quire.v1 import common_pb2
from router.request.vectors import check_inputs, make_vectors, pooling_of, score_pairs

MEAN = Pooling(PoolingKind.MEAN)


@pytest.fixture(autouse=True)
def _embeds(request, monkeypatch):
    """The model embeds, or does the task that the test chooses."""
    fields = {
        "tasks": [getattr(request, "param", common_pb2.TASK_EMBED)],
        "embedding_size": 2,
        "pooling": common_pb2.Pooling(kind=common_pb2.POOLING_KIND_CLS, normalize=True),
    }
    monkeypatch.setattr(FakeScheduler, "model_fields", fields)


def inputs(*texts):
    return [GenerateRequest(prompt=text) for text in texts]


def make(router, *texts, pooling=MEAN):
    made = make_vectors(router.inference, inputs(*texts), pooling, "input[{}]".format)
    return asyncio.create_task(made)


async def test_vectors_come_in_the_order_of_the_inputs(router):
    task = make(router, "one", "two tokens")
    submits = [await router.scheduler.submits.get() for _ in range(2)]
    for submit in submits:
        assert submit.sampling.pooling == common_pb2.Pooling(kind=common_pb2.POOLING_KIND_MEAN)
        assert submit.sampling.max_tokens == 1
    first, second = (submit.first_seq_key for submit in submits)
    # As a scheduler sends it, with a token and an end that have no meaning.
    await router.scheduler.step(
        {second: [9]}, admitted={second: 0}, vectors={second: [3, 4]}, finished={second: LENGTH}
    )
    await router.scheduler.step(admitted={first: 0}, vectors={first: [1, 2]})
    vectors = await task
    assert [each.values.tolist() for each in vectors] == [[1, 2], [3, 4]]
    assert [each.num_tokens for each in vectors] == [
        len(router.inference.text._tokenizer.encode(text)) for text in ("one", "two tokens")
    ]
    assert router.cells.num_live == 0


async def test_one_failure_cancels_the_other_inputs(router):
    task = make(router, "one", "two")
    first, second = [(await router.scheduler.submits.get()).first_seq_key for _ in range(2)]
    error = common_pb2.OutputError(code=grpc.StatusCode.INTERNAL.value[0], message="not finite")
    await router.scheduler.step(finished={first: ERROR}, error=error)
    with pytest.raises(QuireError, match="not finite"):
        await task
    assert await router.scheduler.cancels.get() == [second]
    assert router.cells.num_live == 0


async def test_a_caller_that_leaves_cancels_all(router):
    task = make(router, "one", "two")
    keys = {(await router.scheduler.submits.get()).first_seq_key for _ in range(2)}
    task.cancel()
    while keys:
        keys -= set(await router.scheduler.cancels.get())


async def test_an_end_without_a_vector_is_an_error(router):
    task = make(router, "one")
    key = (await router.scheduler.submits.get()).first_seq_key
    await router.scheduler.step({key: [9]}, finished={key: LENGTH})
    with pytest.raises(QuireError, match="sent no vector"):
        await task


async def test_the_first_refusal_is_the_calls(router):
    await router.scheduler.send_room(0)
    while True:  # until the router knows the model's task
        try:
            router.inference.check_room("")
        except TooBusyError:
            break
        await asyncio.sleep(0)
    with pytest.raises(TooBusyError):
        await make(router, "one")


async def test_a_bad_input_is_named_by_its_index(router):
    with pytest.raises(InvalidArgumentError, match=r"input\[1\] is empty"):
        await make(router, "one", "")
    # A model that only embeds needs no room for an output token.
    with pytest.raises(InvalidArgumentError, match=r"input\[0\] has 64 tokens; .* at most 63$"):
        await make(router, (5,) * 64)


async def test_other_tasks_are_refused_by_name(router):
    with pytest.raises(UnimplementedError, match="'tiny' cannot generate; it can embed"):
        await router.inference.generate(GenerateRequest(prompt="x"))
    with pytest.raises(UnimplementedError, match="'tiny' cannot score; it can embed"):
        await make(router, "x", pooling=Pooling(PoolingKind.SCORE))


async def test_vectors_score_by_their_cosine(router):
    task = asyncio.create_task(
        score_pairs(router.inference, inputs("q"), inputs("a", "b"), str, str)
    )
    values = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
    for vector in values:
        submit = await router.scheduler.submits.get()
        assert submit.sampling.pooling.normalize
        await router.scheduler.step(vectors={submit.first_seq_key: vector})
    scores = await task
    assert scores.values == pytest.approx([0.6, 0.0])


@pytest.mark.parametrize("_embeds", [common_pb2.TASK_EMBED, common_pb2.TASK_SCORE], indirect=True)
@pytest.mark.parametrize(
    ("query", "document", "message"),
    [
        ("", "a", "query is empty"),
        ("q", "\ud800", r"documents\[1\] "),
        ("q", "a " * 64, r"documents\[1\] has \d+ tokens"),
    ],
)
async def test_a_bad_text_of_a_ranking_is_named(router, query, document, message):
    scoring = score_pairs(
        router.inference,
        inputs(query),
        inputs("b", document),
        lambda _: "query",
        "documents[{}]".format,
    )
    with pytest.raises(InvalidArgumentError, match=f"^{message}") as refused:
        await scoring
    assert isinstance(refused.value, ContextLengthError) == ("tokens" in message)


async def test_defaults_are_the_models_and_inputs_are_bounded(router):
    model = router.inference.model.info()
    assert pooling_of(model) == Pooling(PoolingKind.CLS, normalize=True)
    assert pooling_of(model, PoolingKind.LAST, normalize=False, dimensions=1) == Pooling(
        PoolingKind.LAST, dimensions=1
    )
    check_inputs("input", 2048, model, None)
    with pytest.raises(InvalidArgumentError, match=r"has 2049 entries; .* 1 to 2048"):
        check_inputs("input", 2049, model, None)
    with pytest.raises(InvalidArgumentError, match="vectors of size 8192 it must have 1 to 512"):
        check_inputs("input", 513, model, 8192)

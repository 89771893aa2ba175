"""Resuming through a router: it skips the client's part, and reports a client that leaves."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from router_fake_scheduler import LENGTH

from contract.codec.packing import pack_int32, pack_uint64
from contract.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from contract.outputs import FinishReason, OutputDelta, OutputFinished, PromptScores, Usage
from contract.request import GenerateRequest, OutputReceived, ResumeRequest
from contract.sampling import SamplingParams
from quire.v1 import common_pb2, scheduler_pb2

pytestmark = pytest.mark.timeout(120)

REQUEST = GenerateRequest(prompt=(5, 6, 7), request_id="r", resumable=True, tenant="t")
NOTHING = ResumeRequest("r", "t", {}, has_prompt_scores=False, deadline=None)


async def start(router, request=REQUEST):
    live = await router.inference.generate(request)
    return live, await router.scheduler.submits.get()


def news(keys, tokens, *, ended=(), **fields):
    return scheduler_pb2.StepOutput(
        seq_keys=pack_uint64(keys),
        token_ids=pack_int32(tokens),
        finished=[scheduler_pb2.SequenceFinished(seq_key=k, finish_reason=LENGTH) for k in ended],
        **fields,
    )


async def resume(router, submit, tokens, request=NOTHING, *, ended=False, **fields):
    """Resumes a request with one output that has `tokens`; returns it and its key."""
    resuming = asyncio.create_task(router.cells.resume(request))
    asked = await router.scheduler.resumes.get()
    assert (asked.request_id, asked.tenant) == (request.request_id, request.tenant)
    key = asked.first_seq_key
    so_far = news([key] * len(tokens), tokens, ended=[key] if ended else [], **fields)
    await router.scheduler.resumed(submit, key, so_far)
    return await resuming, key


async def test_a_leaving_client_is_reported_and_its_request_is_not_cancelled(router):
    live, submit = await start(router)
    assert submit.HasField("resume_record")
    await live.aclose()
    assert await router.scheduler.leaves.get() == [submit.first_seq_key]
    assert router.scheduler.cancels.empty()
    again, _ = await start(router)  # its id is free
    await again.aclose()


async def test_a_drain_that_takes_too_long_hands_over_what_can_be_resumed(router):
    live, submit = await start(router)
    other, other_submit = await start(router, replace(REQUEST, request_id="o", resumable=False))
    drain = asyncio.create_task(router.cells.drain())
    await asyncio.sleep(0)
    drain.cancel()
    with pytest.raises(UnavailableError, match="'r' continues and can be resumed"):
        await anext(live)
    assert await router.scheduler.leaves.get() == [submit.first_seq_key]
    await router.scheduler.step(finished={other_submit.first_seq_key: LENGTH})
    assert len([event async for event in other]) == 2
    assert router.scheduler.cancels.empty()


async def test_other_requests_are_cancelled_as_ever(router):
    live, submit = await start(router, replace(REQUEST, resumable=False))
    assert not submit.HasField("resume_record")
    await live.aclose()
    assert await router.scheduler.cancels.get() == [submit.first_seq_key]


async def test_the_client_gets_what_it_lacks_and_then_the_rest(router):
    live, submit = await start(router, replace(REQUEST, stop=("NEVER",)))
    await live.aclose()
    tokens = router.tokens("one two three four")
    have, known = tokens[:2], tokens[:-1]
    text = "".join([router.inference.text.token_text(token) for token in have])
    received = {0: OutputReceived(len(have), len(text.encode()))}
    live, key = await resume(router, submit, known, replace(NOTHING, received=received))
    first = await anext(live)
    assert (first.token_offset, list(first.token_ids)) == (2, known[2:])
    await router.scheduler.step({key: tokens[-1:]}, finished={key: LENGTH})
    events = [first, *[event async for event in live]]
    assert text + "".join(e.text for e in events if isinstance(e, OutputDelta)) == (
        "one two three four"
    )
    assert events[-1] == Usage(prompt_tokens=3, completion_tokens=len(tokens), cached_tokens=0)


async def test_a_stop_string_without_a_reader_ends_the_output_at_the_same_token(
    router,
):
    live, submit = await start(router, replace(REQUEST, stop=("three",)))
    await live.aclose()
    tokens = router.tokens("one two three four")
    live, key = await resume(router, submit, tokens)
    events = [event async for event in live]
    assert "".join(e.text for e in events if isinstance(e, OutputDelta)) == "one two "
    assert [e.stop_string for e in events if isinstance(e, OutputFinished)] == ["three"]
    assert await router.scheduler.cancels.get() == [key]


async def test_a_client_that_lacks_only_the_usage_gets_the_usage(router):
    live, submit = await start(router)
    await live.aclose()
    tokens = router.tokens("one")
    received = {0: OutputReceived(len(tokens), len(b"one"), finished=True)}
    request = replace(NOTHING, received=received)
    live, _ = await resume(router, submit, tokens, request, ended=True)
    assert [event async for event in live] == [
        Usage(prompt_tokens=3, completion_tokens=len(tokens), cached_tokens=0)
    ]


@pytest.mark.parametrize(
    ("received", "message"),
    [
        ({1: OutputReceived()}, r"output_index is 1; it must be below n = 1"),
        ({0: OutputReceived(num_tokens=99)}, r"received\[0\].num_tokens is 99"),
        ({0: OutputReceived(num_text_bytes=99)}, r"received\[0\].num_text_bytes is 99"),
        ({0: OutputReceived(num_text_bytes=2)}, "within a character"),
        ({0: OutputReceived(finished=True)}, r"received\[0\].finished is 1"),
    ],
)
async def test_an_impossible_resume_is_refused_and_the_request_stays(router, received, message):
    live, submit = await start(router)
    await live.aclose()
    await router.scheduler.leaves.get()
    with pytest.raises(InvalidArgumentError, match=message):
        await resume(router, submit, router.tokens("🙂"), replace(NOTHING, received=received))
    await router.scheduler.leaves.get()
    live, _ = await resume(router, submit, router.tokens("🙂"))
    await live.aclose()


async def test_log_probabilities_go_with_their_tokens_or_are_refused_by_name(router):
    sampling = SamplingParams(logprobs=0, prompt_logprobs=0)
    live, submit = await start(router, replace(REQUEST, sampling=sampling))
    await live.aclose()
    logprobs = [
        scheduler_pb2.IndexedLogprob(index=i, logprob=common_pb2.TokenLogprob(logprob=-i))
        for i in (1, 2)  # the logprob of token 0 was lost with a scheduler
    ]
    request = replace(NOTHING, received={0: OutputReceived(1)}, has_prompt_scores=True)
    live, _ = await resume(router, submit, [9, 9, 9], request, logprobs=logprobs)
    delta = await anext(live)
    assert not isinstance(delta, PromptScores)
    assert [item.logprob for item in delta.logprobs] == [-1.0, -2.0]
    await live.aclose()
    with pytest.raises(FailedPreconditionError, match="first 1 tokens were lost"):
        await resume(router, submit, [9, 9, 9], logprobs=logprobs)


async def test_the_old_call_of_the_same_router_is_aborted(router):
    old, submit = await start(router)
    await router.scheduler.step({submit.first_seq_key: [9]})
    await anext(old)
    new, key = await resume(router, submit, [9])
    with pytest.raises(AbortedError, match="resumed by another call"):
        await anext(old)
    await old.aclose()
    await router.scheduler.step({key: [10], submit.first_seq_key: [99]})
    token_ids = []
    while len(token_ids) < 2:
        token_ids += (await anext(new)).token_ids
    assert token_ids == [9, 10]
    await new.aclose()


async def test_a_call_whose_request_was_resumed_elsewhere_ends_with_aborted(router):
    live, submit = await start(router)
    await router.scheduler.step({submit.first_seq_key: [9]})
    await anext(live)
    await router.scheduler.refuse(submit.first_seq_key, grpc.StatusCode.ABORTED, "resumed")
    end = await anext(live)
    assert (end.finish_reason, end.error.code) == (FinishReason.ERROR, 10)


@pytest.mark.parametrize("tenant", ["", "other"])
async def test_only_its_tenant_finds_a_request_that_is_read_here(router, tenant):
    live, _ = await start(router)
    for call in (
        router.cells.resume(replace(NOTHING, tenant=tenant)),
        router.cells.cancel("r", tenant),
    ):
        asking = asyncio.create_task(call)
        asked = await router.scheduler.resumes.get()
        assert asked.tenant == tenant, "another tenant's id means nothing to the one here"
        await router.scheduler.refuse(asked.first_seq_key, grpc.StatusCode.NOT_FOUND, "unknown")
        with pytest.raises(NotFoundError):
            await asking
    assert live.live_seq_keys
    await live.aclose()


async def test_an_id_that_the_scheduler_does_not_know_is_not_found(router):
    resuming = asyncio.create_task(router.cells.resume(NOTHING))
    asked = await router.scheduler.resumes.get()
    await router.scheduler.refuse(asked.first_seq_key, grpc.StatusCode.NOT_FOUND, "unknown")
    with pytest.raises(NotFoundError, match="unknown"):
        await resuming


async def test_without_a_scheduler_a_resume_is_refused_for_a_retry(router):
    resuming = asyncio.create_task(router.cells.resume(NOTHING))
    await router.scheduler.resumes.get()
    await router.scheduler.stop()
    with pytest.raises(UnavailableError, match="lost the scheduler"):
        await resuming
    with pytest.raises(UnavailableError):
        await router.cells.resume(NOTHING)


async def test_a_call_that_ends_while_it_resumes_leaves_the_request(router):
    _, submit = await start(router)
    resuming = asyncio.create_task(router.cells.resume(replace(NOTHING, request_id="s")))
    asked = await router.scheduler.resumes.get()
    resuming.cancel()
    await router.scheduler.resumed(submit, asked.first_seq_key)
    assert await router.scheduler.leaves.get() == [asked.first_seq_key]


async def test_cancel_ends_the_request_whoever_reads_it(router):
    _, submit = await start(router)
    cancelling = asyncio.create_task(router.cells.cancel("r", "t"))
    asked = await router.scheduler.resumes.get()
    await router.scheduler.resumed(submit, asked.first_seq_key)
    await cancelling
    assert await router.scheduler.cancels.get() == [asked.first_seq_key]


async def test_a_resumed_request_is_submitted_again_to_the_next_scheduler_with_its_ends(router):
    live, submit = await start(router, replace(REQUEST, n=2))
    await live.aclose()
    resuming = asyncio.create_task(router.cells.resume(NOTHING))
    key = (await router.scheduler.resumes.get()).first_seq_key
    await router.scheduler.resumed(submit, key, news([key, key + 1], [9, 8], ended=[key]))
    live = await resuming
    await router.scheduler.stop()
    await router.scheduler.start()
    again = await router.scheduler.submits.get()
    assert [(o.finished, o.end.finish_reason) for o in again.outputs] == [
        (True, LENGTH),
        (False, 0),
    ]
    del again.outputs[:]
    submit.first_seq_key, submit.is_again = key, True
    assert again == submit
    await live.aclose()

"""Operators list and end a router's live requests; clients see the end."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from router_fake_scheduler import LENGTH

from contract.codec.packing import pack_int32, pack_uint64
from contract.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError
from contract.outputs import FinishReason, OutputFinished
from contract.request import GenerateRequest
from quire.v1 import scheduler_pb2
from quire.v1.requests_pb2 import RequestFilter, RequestState
from router.operators.live_requests import LiveRequests
from rpc.security.operators import Operators

pytestmark = pytest.mark.timeout(60)

PEER = "unix:"
REQUEST = GenerateRequest(prompt=(5, 6, 7), request_id="r", tenant="t", priority=3)


@pytest.fixture
def live_requests(router):
    operators = Operators(None, has_client_certificates=False, obeys_loopback=False)
    return LiveRequests(router.cells, operators)


async def start(router, **changes):
    live = await router.inference.generate(replace(REQUEST, **changes))
    return live, (await router.scheduler.submits.get()).first_seq_key


def ids(requests):
    return [request.request_id for request in requests]


async def test_list_says_who_asked_how_long_ago_and_how_far_it_is(router, live_requests):
    async with (await start(router, n=2))[0]:
        live, key = await start(router, request_id="s", tenant="", priority=0, resumable=True)
        async with live:
            await router.scheduler.step({key: [70]})
            await anext(live)
            first, second = live_requests.list(RequestFilter(), PEER)
            assert first.age_s >= second.age_s >= 0
            first.age_s = second.age_s = 0
            assert str(first) == (
                'request_id: "r"\ntenant: "t"\nstate: REQUEST_STATE_WAITING\nmodel: "tiny"\n'
                "num_prompt_tokens: 3\nnum_outputs: 2\npriority: 3\n"
            )
            assert str(second) == (
                'request_id: "s"\nstate: REQUEST_STATE_RUNNING\nmodel: "tiny"\n'
                "num_prompt_tokens: 3\nnum_output_tokens: 1\nnum_outputs: 1\nis_resumable: true\n"
            )
            await router.scheduler.step(finished={key: LENGTH})
            await anext(live)
            (_, ended) = live_requests.list(RequestFilter(), PEER)
            assert ended.state == RequestState.REQUEST_STATE_UNREAD
            assert live_requests.list(RequestFilter(min_age_s=3600), PEER) == []


@pytest.mark.parametrize(
    ("asked", "passing"),
    [
        (RequestFilter(request_id="a"), ["a"]),
        (RequestFilter(tenant="t"), ["a", "b"]),
        (RequestFilter(tenant=""), ["c"]),
        (RequestFilter(min_age_s=0), ["a", "b", "c"]),
        (RequestFilter(min_age_s=3600), []),
        (RequestFilter(tenant="t", request_id="b"), ["b"]),
    ],
)
async def test_filter_chooses_what_is_ended(router, live_requests, asked, passing):
    lives = [
        (await start(router, request_id=name, tenant=tenant))[0]
        for name, tenant in (("a", "t"), ("b", "t"), ("c", ""))
    ]
    assert ids(live_requests.list(asked, PEER)) == passing
    assert ids(await live_requests.cancel(asked, PEER)) == passing
    for live in lives:
        if live.request_id in passing:
            with pytest.raises(PermissionDeniedError, match="an operator has ended the request"):
                await anext(live)
        await live.aclose()


async def test_client_that_has_read_gets_the_error_as_the_end_of_each_output(router, live_requests):
    live, key = await start(router, n=2, resumable=True)
    async with live:
        await router.scheduler.step({key: [70]})
        await anext(live)
        assert ids(await live_requests.cancel(RequestFilter(request_id="r"), PEER)) == ["r"]
        assert await router.scheduler.cancels.get() == [key, key + 1]
        ends = [event async for event in live if isinstance(event, OutputFinished)]
    assert [end.finish_reason for end in ends] == [FinishReason.ERROR] * 2
    assert ends[0].error is not None
    assert ends[0].error.message == "an operator has ended the request"
    assert not ends[0].error.retryable
    assert router.scheduler.leaves.empty(), "a resumable one ends, too"
    assert router.cells.num_live == 0


async def test_request_that_is_still_prepared_is_not_submitted(router, live_requests, monkeypatch):
    begun, go_on = asyncio.Event(), asyncio.Event()
    prepare = router.inference.text.prepare

    async def prepare_late(request):
        begun.set()
        await go_on.wait()
        return await prepare(request)

    monkeypatch.setattr(router.inference.text, "prepare", prepare_late)
    asking = asyncio.create_task(router.inference.generate(REQUEST))
    await begun.wait()
    (listed,) = live_requests.list(RequestFilter(), PEER)
    assert listed.state == RequestState.REQUEST_STATE_PREPARING
    assert ids(await live_requests.cancel(RequestFilter(tenant="t"), PEER)) == ["r"]
    go_on.set()
    with pytest.raises(PermissionDeniedError, match="an operator"):
        await asking
    assert router.scheduler.submits.empty()
    assert router.cells.num_live == 0


async def test_resumable_request_that_nobody_reads_is_cancelled_by_id_and_tenant(
    router, live_requests
):
    live, _ = await start(router, resumable=True)
    submit = live.record
    await live.aclose()
    assert await router.scheduler.leaves.get()
    asked = RequestFilter(request_id="r", tenant="t")
    cancelling = asyncio.create_task(live_requests.cancel(asked, PEER))
    resume = await router.scheduler.resumes.get()
    assert (resume.request_id, resume.tenant) == ("r", "t")
    key = resume.first_seq_key
    so_far = scheduler_pb2.StepOutput(seq_keys=pack_uint64([key]), token_ids=pack_int32([70]))
    again = scheduler_pb2.Submit(
        request_id="r", tenant="t", prompt_token_ids=pack_int32(submit.prompt_token_ids), n=1
    )
    again.sampling.max_tokens = 5
    again.resume_record = submit.resume_record
    await router.scheduler.resumed(again, key, so_far)
    assert ids(await cancelling) == ["r"]
    assert await router.scheduler.cancels.get() == [key]


async def test_what_has_ended_by_itself_is_not_ended_again(router, live_requests):
    live, key = await start(router)
    async with live:
        await router.scheduler.step({key: [70]}, finished={key: LENGTH})
        await anext(live)
        assert await live_requests.cancel(RequestFilter(request_id="r"), PEER) == []
        end = await anext(live)
        assert isinstance(end, OutputFinished)
        assert end.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("asked", "field"),
    [(RequestFilter(), "filter"), (RequestFilter(min_age_s=float("nan")), "filter.min_age_s")],
)
async def test_filter_that_chooses_nothing_is_refused(live_requests, asked, field):
    with pytest.raises(InvalidArgumentError) as caught:
        await live_requests.cancel(asked, PEER)
    assert caught.value.field == field


async def test_only_operators_may(live_requests):
    with pytest.raises(PermissionDeniedError, match="lists requests only for callers on its Unix"):
        live_requests.list(RequestFilter(), "ipv4:127.0.0.1:1")
    with pytest.raises(PermissionDeniedError, match="cancels requests only for callers on its Un"):
        await live_requests.cancel(RequestFilter(min_age_s=0), "ipv4:127.0.0.1:1")


async def test_unknown_id_is_not_found(router, live_requests):
    asked = RequestFilter(request_id="x")
    cancelling = asyncio.create_task(live_requests.cancel(asked, PEER))
    key = (await router.scheduler.resumes.get()).first_seq_key
    await router.scheduler.refuse(key, grpc.StatusCode.NOT_FOUND, "it is not known")
    with pytest.raises(NotFoundError, match="'x' of tenant '' is not live here"):
        await cancelling

"""`quire requests` and `quire cancel` against a fake of the router."""

import asyncio
import json

import pytest

from contract.errors import NotFoundError
from quire.cli.__main__ import main
from quire.v1 import requests_pb2, requests_pb2_grpc

LIVE = requests_pb2.LiveRequest(
    request_id="9a0fe776e18f4c09896ac80b03354fcc",
    tenant="search",
    age_s=2.25,
    state=requests_pb2.REQUEST_STATE_RUNNING,
    model="m",
    num_prompt_tokens=4,
    num_output_tokens=17,
)


class FakeRouter(requests_pb2_grpc.RequestServiceServicer):
    def __init__(self):
        self.asked = []
        self.metadata = ()

    async def ListRequests(self, request, context):  # noqa: N802
        self.asked.append(request.filter)
        self.metadata = context.invocation_metadata()
        return requests_pb2.ListRequestsResponse(requests=[LIVE])

    async def CancelRequests(self, request, context):  # noqa: N802, ARG002
        if request.filter.request_id == "x":
            raise NotFoundError("request 'x' of tenant '' is not live here")
        self.asked.append(request.filter)
        return requests_pb2.CancelRequestsResponse(
            requests=[] if request.filter.min_age_s > 60 else [LIVE]
        )

    async def ReadUsage(self, request, context):  # noqa: N802, ARG002
        self.asked.append(request)
        sums = {"requests": 2, "prompt_tokens": 1500, "cached_tokens": 16}
        sums |= {"generated_tokens": 70, "reasoning_tokens": 9}
        row = requests_pb2.UsageRow(hour=1795428000, tenant="search", **sums)
        return requests_pb2.ReadUsageResponse(rows=[row])


@pytest.fixture
async def router(serve):
    fake = FakeRouter()
    fake.target = await serve(requests_pb2_grpc.add_RequestServiceServicer_to_server, fake)
    return fake


async def run(router, *argv):
    command, *flags = argv
    return await asyncio.to_thread(main, [command, *flags, "--target", router.target])


async def test_requests_are_listed_with_their_whole_id(router, capsys):
    assert await run(router, "requests", "--tenant", "search", "--api-key", "k") == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells == [LIVE.request_id, "search", "2.2", "s", "4", "17", "running", "m"]
    assert router.asked == [requests_pb2.RequestFilter(tenant="search")]
    assert ("authorization", "Bearer k") in router.metadata


async def test_requests_are_json_for_programs(router, capsys):
    assert await run(router, "requests", "--json", "--older-than-s", "2") == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["request_id"], listed["state"]) == (LIVE.request_id, "running")
    assert router.asked == [requests_pb2.RequestFilter(min_age_s=2)]


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        (["a", "b"], [{"request_id": "a"}, {"request_id": "b"}]),
        (["a", "--tenant", "t"], [{"request_id": "a", "tenant": "t"}]),
        (["--tenant", "search"], [{"tenant": "search"}]),
        (["--older-than-s", "60"], [{"min_age_s": 60}]),
        (["--all"], [{"min_age_s": 0}]),
    ],
)
async def test_cancel_chooses_by_id_tenant_or_age(router, capsys, flags, asked):
    assert await run(router, "cancel", *flags) == 0
    assert router.asked == [requests_pb2.RequestFilter(**each) for each in asked]
    line = f"{LIVE.request_id} of search ended after 17 tokens"
    assert capsys.readouterr().out.splitlines() == [line] * len(asked)


async def test_cancel_says_if_nothing_was_ended(router, capsys):
    assert await run(router, "cancel", "--older-than-s", "61") == 0
    assert capsys.readouterr().out == "no live request matches\n"
    assert await run(router, "cancel", "x") == 1
    assert "'x' of tenant '' is not live" in capsys.readouterr().err


def test_cancel_must_choose(capsys):
    with pytest.raises(SystemExit):
        main(["cancel"])
    assert "give ids, --tenant, --older-than-s or --all" in capsys.readouterr().err


async def test_usage_is_shown_by_what_is_asked(router, capsys):
    assert await run(router, "usage", "--since", "2026-11-01", "--by", "hour,tenant") == 0
    assert capsys.readouterr().out.split() == [
        *("hour", "tenant", "requests", "prompt", "cached", "generated", "reasoning"),
        *("2026-11-23T10:00Z", "search", "2", "1,500", "16", "70", "9"),
    ]
    asked = router.asked.pop()
    assert asked == requests_pb2.ReadUsageRequest(since=1793491200, by=["hour", "tenant"])
    assert await run(router, "usage", "--since", "30d", "--by", "tenant", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tenant"] == "search"
    assert await run(router, "usage", "--since", "yesterday") == 1
    assert "--since is 'yesterday'; it must be like" in capsys.readouterr().err

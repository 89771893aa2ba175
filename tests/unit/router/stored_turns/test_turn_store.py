"""The store of turns: atomic writes, the router that owns a turn, its tenant."""

import asyncio
import time
from dataclasses import replace

import pytest

from contract.errors import InvalidArgumentError
from contract.outputs import FinishReason, OutputDelta, OutputFinished, TokenLogprob, Usage
from router.live.usage import HOUR_S, UsageKey, Used
from router.stored_turns import fair_claims
from router.stored_turns import store as store_module
from router.stored_turns.fair_claims import Models
from router.stored_turns.groups import GroupCounts
from router.stored_turns.store import TurnChanges, TurnProgress
from router.stored_turns.turn import Turn, TurnEnd, TurnStatus
from router.stored_turns.usage import read_usage

TURN = Turn(
    id="resp_1", tenant="t", kind="response", body=b"{}", created_at=1.0, status=TurnStatus.RUNNING
)
END = TurnEnd(TurnStatus.COMPLETED, b'{"a": 1}', 9.0)
EVENTS = (
    OutputDelta(0, 0, (1, 2), "", (TokenLogprob(-0.5, ((3, -0.5),)), TokenLogprob(-1.5, ()))),
    OutputFinished(0, FinishReason.STOP, stop_string="x"),
    Usage(3, 2, 1),
)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, path):
    """Tests run with both databases."""
    if request.param == "sqlite":
        return str(path)
    return request.getfixturevalue("postgres").new_database()


async def insert_queued(store, turns):
    await store.database.run(
        lambda cursor, _: [store_module.insert_turn(cursor, turn, "", 0.0) for turn in turns]
    )


async def test_a_turn_is_read_as_it_was_written(new_store):
    store = new_store()
    turn = replace(TURN, record=b"\x00r", idempotency_key="k", previous_id="p", group="g")
    assert await store.write(TurnChanges([turn])) == {turn.id}
    assert await store.find("t", turn.id) == turn
    assert await store.find_by_key("t", "k") == turn
    own = await store.write(TurnChanges(progress=[TurnProgress(turn.id, 0, EVENTS, end=END)]))
    assert own == {turn.id}
    ended = replace(turn, status=TurnStatus.COMPLETED, result=END.result, ended_at=END.at)
    assert await store.find("t", turn.id) == ended
    assert tuple(await store.events(turn.id)) == EVENTS
    assert tuple(await store.events(turn.id, 1)) == EVENTS[1:]


async def test_a_tenant_sees_its_own_turns_only(new_store):
    store = new_store()
    await store.write(TurnChanges([replace(TURN, idempotency_key="k")]))
    assert await store.find("other", TURN.id) is None
    assert await store.find_by_key("other", "k") is None
    assert not await store.conversation("other", TURN.id, 99)
    assert not await store.delete("other", TURN.id)
    assert not await store.end("other", TURN.id, END, ())
    assert await store.delete("t", TURN.id)
    assert await store.find("t", TURN.id) is None


async def test_a_key_is_taken_once(new_store):
    store = new_store()
    first = replace(TURN, idempotency_key="k")
    second = replace(first, id="resp_2")
    assert await store.write(TurnChanges([first, second])) == {first.id}
    assert await store.find("t", second.id) is None
    elsewhere = replace(second, tenant="u")
    assert await store.write(TurnChanges([elsewhere])) == {first.id, second.id}


async def test_a_turn_that_is_not_renewed_goes_to_another_router(new_store, monkeypatch):
    first, second = new_store(), new_store()
    await first.write(TurnChanges([TURN]))
    assert not await second.claim(9)
    monkeypatch.setattr(store_module, "LEASE_S", -1.0)
    await first.write(TurnChanges())
    monkeypatch.setattr(store_module, "LEASE_S", 60.0)
    assert await second.claim(9) == [TURN]
    # The first router's remaining events are no longer written.
    delta = OutputDelta(0, 0, (1,), "")
    assert (
        await first.write(TurnChanges(progress=[TurnProgress(TURN.id, 0, (delta,), end=END)]))
        == set()
    )
    assert not await second.events(TURN.id)
    assert (await second.find("t", TURN.id)).status is TurnStatus.RUNNING


async def test_a_released_turn_is_free_at_once(new_store):
    first, second = new_store(), new_store()
    await first.write(TurnChanges([TURN]))
    await first.write(TurnChanges(released=[TURN.id]))
    assert await second.claim(9) == [TURN]


async def test_queued_turns_are_taken_up_in_their_order(new_store):
    store = new_store()
    queued = replace(TURN, status=TurnStatus.QUEUED, group="g")
    turns = [
        replace(queued, id=f"t{i}", priority=priority, position=i)
        for i, priority in enumerate((0, -1, 1, 0))
    ]
    await insert_queued(store, turns)
    assert await store.count_group("g") == GroupCounts()
    assert await store.is_group_live("g")
    assert await store.list_group("t", "g", first_position=2) == turns[2:]
    size = len(TURN.body)
    for max_bytes, num in ((0, 1), (2 * size - 1, 1), (2 * size, 2), (9 * size, 4)):
        assert await store.list_group("t", "g", max_bytes=max_bytes) == turns[:num]
    assert not await store.claim(3)  # they belong to a group
    assert [turn.id for turn in await store.claim(0, 3)] == ["t2", "t0", "t3"]
    assert [turn.id for turn in await store.claim(0, 3)] == ["t1"]


def queued(tenant, num, **fields):
    turn = replace(TURN, status=TurnStatus.QUEUED, tenant=tenant, group=f"of {tenant}", **fields)
    return [replace(turn, id=f"{tenant}{i}", position=i) for i in range(num)]


async def test_a_large_batch_leaves_places_to_other_tenants(new_store):
    store = new_store()
    await insert_queued(store, queued("a", 60) + queued("b", 3, created_at=2.0))
    ids = [turn.id for turn in await store.claim(0, 4)]
    assert ids == ["a0", "b0", "a1", "b1"]
    # A router that computes many lines of one tenant serves the other first.
    ids = [turn.id for turn in await store.claim(0, 3, num_running={"a": 9, "b": 7})]
    assert ids == ["b2", "a2", "a3"]


async def test_tenants_take_turns_for_one_place(new_store):
    store = new_store()
    for tenant in "abc":
        await insert_queued(store, queued(tenant, 3))
    ids = [turn.id for _ in range(7) for turn in await store.claim(0, 1)]
    assert ids == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]


async def test_a_tenant_s_models_are_one_queue_and_a_claim_takes_its_models_only(new_store):
    store = new_store()
    first, second, third = queued("a", 3)
    turns = [replace(first, model="x"), replace(second, model="y"), replace(third, model="z")]
    await insert_queued(store, reversed(turns))
    ids = [turn.id for turn in await store.claim(0, 9, Models(("x", "y", "w")))]
    assert ids == ["a0", "a1"]
    assert not await store.claim(0, 9, Models(("z",), are_left_out=True))
    assert [turn.id for turn in await store.claim(0, 9, Models(("z",)))] == ["a2"]


async def test_a_tenant_with_many_models_leaves_places_to_others(new_store, monkeypatch):
    monkeypatch.setattr(fair_claims, "MAX_MODELS", 2)
    store = new_store()
    many = [replace(turn, model=f"unknown {i}") for i, turn in enumerate(queued("a", 4))]
    await insert_queued(store, many + queued("b", 1))
    ids = [[turn.id for turn in await store.claim(0, 9)] for _ in range(2)]
    assert ids == [["a0", "b0", "a1"], []]
    for turn in many[:2]:
        assert await store.end("a", turn.id, END, ())
    assert [turn.id for turn in await store.claim(0, 9)] == ["a2", "a3"]


async def test_no_tenant_starves_behind_more_queues_than_a_claim_looks_at(new_store, monkeypatch):
    monkeypatch.setattr(fair_claims, "MAX_QUEUES", 2)
    store = new_store()
    for tenant in "abcde":
        await insert_queued(store, queued(tenant, 3))
    ids = [turn.id for _ in range(6) for turn in await store.claim(0, 1)]
    assert ids == ["a0", "b0", "c0", "d0", "e0", "a1"]
    ids = [[turn.id for turn in await store.claim(0, 9)] for _ in range(4)]
    assert [len(each) for each in ids] == [4, 4, 1, 0]
    await insert_queued(store, queued("f", 1))  # behind tenants whose turns all have an owner
    assert [turn.id for _ in range(3) for turn in await store.claim(0, 1)] == ["f0"]


async def test_a_group_counts_its_ended_turns_and_what_they_used(new_store):
    store = new_store()
    turns = [replace(TURN, id=f"t{i}", group="g") for i in range(4)]
    await store.write(TurnChanges(turns))
    used = Used(1, 3, 1, 2, 0)
    completed, failed = (
        TurnEnd(status, b"1234", 9.0, used=used)
        for status in (TurnStatus.COMPLETED, TurnStatus.FAILED)
    )
    ended = TurnChanges(
        progress=[TurnProgress(f"t{i}", 0, (), end=end) for i, end in enumerate((completed,) * 2)]
    )
    await store.write(ended)
    await store.write(ended)  # a write whose confirmation was lost
    assert await store.end("t", "t2", failed, ())
    assert not await store.end("t", "t2", failed, ())
    assert await store.count_group("g") == GroupCounts(2, 1, 12, Used(3, 9, 3, 6, 0))
    assert await store.is_group_live("g")
    assert await store.end("t", "t3", replace(failed, status=TurnStatus.CANCELLED), ())
    assert await store.count_group("g") == GroupCounts(2, 1, 16, Used(4, 12, 4, 8, 0))
    assert not await store.is_group_live("g")


async def test_a_conversation_is_whole_or_missing_and_bounded(new_store, monkeypatch):
    store = new_store()
    turns = [replace(TURN, id=f"t{i}", previous_id=f"t{i - 1}" if i else None) for i in range(3)]
    await store.write(TurnChanges([replace(turn, record=b"its whole prompt") for turn in turns]))
    assert await store.conversation("t", "t2", 6) == turns
    with pytest.raises(InvalidArgumentError, match="6 bytes or more; it must have at most 5"):
        await store.conversation("t", "t2", 5)
    monkeypatch.setattr(store_module, "MAX_CHAIN", 2)
    with pytest.raises(InvalidArgumentError, match="3 turns or more; it must have at most 2"):
        await store.conversation("t", "t2", 6)
    await store.delete("t", "t1")
    assert not await store.conversation("t", "t2", 6)


async def test_old_turns_are_swept_with_their_events(new_store):
    store = new_store()
    await store.write(TurnChanges([TURN, replace(TURN, id="live")]))
    await store.write(TurnChanges(progress=[TurnProgress(TURN.id, 0, EVENTS, end=END)]))
    assert await store.sweep(10**12, 10**12) == 0
    assert await store.sweep(1.0, 1.0) == 1
    assert not await store.events(TURN.id)
    assert await store.find("t", TURN.id) is None
    assert await store.find("t", "live") is not None


async def test_an_ended_turn_is_not_ended_again(new_store):
    store = new_store()
    await store.write(TurnChanges([TURN]))
    assert await store.end("t", TURN.id, replace(END, status=TurnStatus.CANCELLED), EVENTS)
    assert not await store.end("t", TURN.id, END, EVENTS)
    assert (await store.find("t", TURN.id)).status is TurnStatus.CANCELLED
    assert await store.write(TurnChanges(progress=[TurnProgress(TURN.id, 3, (), end=END)])) == set()


async def test_routers_that_claim_at_once_share_the_turns(new_store):
    stores = [new_store() for _ in range(3)]
    turns = [
        replace(TURN, id=f"t{i}", status=TurnStatus.QUEUED, position=i, group="g")
        for i in range(60)
    ]
    await insert_queued(stores[0], turns)
    claimed = await asyncio.gather(*(store.claim(0, 30) for store in stores))
    ids = [turn.id for share in claimed for turn in share]
    assert len(ids) == len(set(ids)) == 60


KEY = UsageKey("t", "laptop", "tiny")
HOUR = 1_000_000 * HOUR_S


async def usage_of(store, by, since=0.0, until=None):
    rows = await read_usage(store.database, since, until, by)
    return [(tuple(row.group.values()), row.used) for row in rows]


async def test_usage_is_summed_up_by_what_is_asked(new_store):
    first, second = new_store(), new_store()
    other = replace(KEY, tenant="u", adapter="a")
    early, late = Used(1, 10, 4, 5, 2), Used(2, 30, 0, 6, 0)
    await first.write(TurnChanges(usage=(1, {(HOUR, KEY): early, (HOUR, other): late})))
    await second.write(TurnChanges(usage=(1, {(HOUR + HOUR_S, KEY): late})))
    assert await usage_of(first, ("tenant",)) == [
        (("t",), Used(3, 40, 4, 11, 2)),
        (("u",), Used(2, 30, 0, 6, 0)),
    ]
    assert await usage_of(first, ()) == [((), Used(5, 70, 4, 17, 2))]
    assert await usage_of(first, ("hour", "key"), HOUR + HOUR_S + 9) == [
        ((HOUR + HOUR_S, "laptop"), late)
    ]
    assert await usage_of(first, ("adapter",), until=HOUR + 1) == [(("",), early), (("a",), late)]
    days = await usage_of(second, ("day", "model"))
    assert days == [((HOUR - HOUR % 86400, "tiny"), Used(5, 70, 4, 17, 2))]
    with pytest.raises(InvalidArgumentError, match="by has 'prompt'; it must have some of hour"):
        await usage_of(first, ("prompt",))
    await first.sweep(10**12, retention_of(HOUR + HOUR_S))
    assert await usage_of(first, ("tenant",)) == [(("t",), late)]


def retention_of(hour):
    return time.time() - hour


async def test_usage_whose_answer_was_lost_is_added_once(new_store):
    store, other = new_store(), new_store()
    part = TurnChanges(usage=(1, {(HOUR, KEY): Used(1, 1, 1, 1, 1)}))
    for writer in (store, store, other):
        await writer.write(part)
    await store.write(replace(part, usage=(2, part.usage[1])))
    assert await usage_of(store, ()) == [((), Used(3, 3, 3, 3, 3))]


async def test_a_turn_s_usage_is_kept_with_its_end_and_once(new_store):
    store = new_store()
    used = Used(1, 3, 1, 2, 0)
    end = replace(END, usage={(HOUR, KEY): used})
    turns = [TURN, replace(TURN, id="resp_2")]
    await store.write(TurnChanges(turns))
    ended = TurnChanges(progress=[TurnProgress(TURN.id, 0, EVENTS, end=end)])
    await store.write(ended)
    await store.write(ended)
    assert await store.end("t", "resp_2", end, ())
    assert not await store.end("t", "resp_2", end, ())
    assert await usage_of(store, ("tenant", "key")) == [(("t", "laptop"), Used(2, 6, 2, 4, 0))]

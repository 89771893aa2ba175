"""Moves between the tiers, without a scheduler: what asks for a step, and when one has ended."""

import numpy as np
import pytest

from scheduler_svc.core.block_pool import DeviceBlockId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import BrokenInvariantError
from scheduler_svc.core.host_tier import HostTier
from scheduler_svc.core.plan import StepId, StepOutcome
from scheduler_svc.core.plan_draft import PlanDraft


def make_tier(**overrides):
    settings = {"block_size": 4, "num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    settings |= {"max_model_len": 32, "num_host_blocks": 6, "num_disk_blocks": 4}
    return HostTier(SchedulerConfig(**(settings | overrides)))


def send(tier, step=1):
    draft = PlanDraft(StepId(step), 0.0, 0, 64)
    tier.send(draft)
    return draft


def outcome(**disk):
    none = np.empty(0, np.int32)
    ends = {name: np.array(blocks, np.int32) for name, blocks in disk.items()}
    return StepOutcome(StepId(1), none, none, none, none, **ends)


def test_a_store_alone_asks_for_a_step_and_so_does_a_load():
    tier = make_tier()
    assert not tier.has_moves
    (host,) = tier.pool.allocate(1)
    disk = tier.disk.keep(host, None)
    assert tier.has_moves
    assert not tier.disk.is_loading
    assert send(tier).disk_store_dst == [disk]
    assert not tier.has_moves, "it is under way"
    assert tier.disk.is_busy
    tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    assert not tier.disk.is_busy
    tier.disk.load(disk, host, None)
    assert tier.has_moves
    assert tier.disk.is_loading


def test_the_end_of_a_move_that_has_not_gone_out_is_a_bug():
    tier = make_tier()
    (host,) = tier.pool.allocate(1)
    disk = tier.disk.keep(host, None)
    with pytest.raises(BrokenInvariantError, match=f"no store to disk block {disk} is under way"):
        tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    send(tier)
    tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    tier.disk.load(disk, host, None)
    with pytest.raises(BrokenInvariantError, match=f"no load to host block {host} is under way"):
        tier.disk.answer(outcome(loaded_host_block_ids=[host]))


def test_blocks_are_moving_from_when_it_is_asked_for_until_the_step_is_answered():
    tier = make_tier()
    assert not tier.is_moving
    (host,) = tier.swap_out([DeviceBlockId(0)], [])
    assert tier.is_moving
    send(tier)
    assert not tier.is_moving, "a swap-out has read before its step computes"
    tier.swap_in([host], [DeviceBlockId(1)])
    assert tier.is_moving
    send(tier, 2)
    assert tier.is_moving
    tier.answer(StepId(2), np.empty(0, np.int32))
    assert not tier.is_moving


def test_what_is_swapped_out_is_found_up_to_the_last_full_block():
    tier = make_tier()
    hashes = [bytes([i]) * 32 for i in range(3)]
    targets = tier.swap_out([DeviceBlockId(block) for block in (5, 6, 7)], hashes[:2])
    assert tier.find(hashes) == ([], targets[:2])


def test_more_loads_than_the_limit_ask_for_no_step_until_one_has_ended():
    tier = make_tier(max_disk_moves=1)
    sources, targets = tier.disk.pool.allocate(2), tier.pool.allocate(2)
    for source, target in zip(sources, targets, strict=True):
        tier.disk.load(source, target, None)
    assert send(tier).disk_load_src == sources[:1]
    assert not tier.has_moves
    tier.disk.answer(outcome(loaded_host_block_ids=targets[:1]))
    assert tier.has_moves
    assert send(tier).disk_load_src == sources[1:]


def test_nothing_is_demoted_while_swap_ins_wait_and_then_as_many_as_the_limit():
    tier = make_tier(max_swap_blocks=2)
    hashes = [bytes([i]) * 32 for i in range(4)]
    tier.swap_in(tier.pool.allocate(1), [DeviceBlockId(7)])
    tier.begin_step()
    tier.demote(DeviceBlockId(0), hashes[0])
    assert tier.find(hashes[:1]) == ([], [])
    assert send(tier).swap_in_dst == [7]
    tier.begin_step()
    for block, block_hash in enumerate(hashes):
        tier.demote(DeviceBlockId(block), block_hash)
    assert [len(tier.find([h])[1]) for h in hashes] == [1, 1, 0, 0]
    assert tier.num_demoted == 2
    assert send(tier, 2).swap_out_src == [0, 1]

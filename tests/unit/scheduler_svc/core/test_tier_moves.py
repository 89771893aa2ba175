"""Moves between tiers, without a scheduler: those that need a step, and their ends."""

import numpy as np
import pytest

from contract.step import Result, StepId
from scheduler_svc.core.interface.config import SchedulerConfig
from scheduler_svc.core.interface.errors import BrokenInvariantError
from scheduler_svc.core.plan import PlanBuilder
from scheduler_svc.core.space.blocks import DeviceBlockId
from scheduler_svc.core.tiers.host_tier import HostTier

HASH, OTHER = bytes([1]) * 32, bytes([2]) * 32


def make_tier(**overrides):
    settings = {"block_size": 4, "num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    settings |= {"max_model_len": 32, "num_host_blocks": 6, "num_disk_blocks": 4}
    return HostTier(SchedulerConfig(**(settings | overrides)))


def send(tier, step=1):
    draft = PlanBuilder(StepId(step), 0.0, 0)
    tier.send(draft)
    return draft


def outcome(**disk):
    none = np.empty(0, np.int32)
    ends = {name: np.array(blocks, np.int32) for name, blocks in disk.items()}
    return Result(StepId(1), none, none, none, none, **ends)


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
    assert tier.disk.is_busy


def test_the_end_of_a_move_that_has_not_gone_out_is_a_bug():
    tier = make_tier()
    (host,) = tier.pool.allocate(1)
    disk = tier.disk.keep(host, None)
    with pytest.raises(BrokenInvariantError, match=f"no store to disk block {disk} is in progress"):
        tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    send(tier)
    tier.disk.answer(outcome(stored_disk_block_ids=[disk]))
    tier.disk.load(disk, host, None)
    with pytest.raises(BrokenInvariantError, match=f"no load to host block {host} is in progress"):
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


def test_so_many_can_be_demoted_as_delay_no_swap_in():
    tier = make_tier(max_swap_blocks=2)
    tier.begin_step()
    assert tier.num_demotions_left == 2, "of six blocks"
    (host,) = tier.pool.allocate(1)
    others = tier.pool.allocate(4)
    assert tier.num_demotions_left == 1, "there is no more room"
    tier.swap_in([host], [DeviceBlockId(7)])
    assert tier.num_demotions_left == 0
    tier.pool.drop(others)
    tier.swap_out([DeviceBlockId(6)], [])
    assert tier.num_demotions_left == 2, "the swap-in must wait in any case"


def test_one_disk_block_is_a_disk():
    tier = make_tier(num_host_blocks=1, num_disk_blocks=1)
    tier.pool.drop(tier.swap_out([DeviceBlockId(0)], [HASH]))
    send(tier)
    tier.take_free()
    assert send(tier, 2).disk_store_dst == [0]


def test_a_move_to_a_block_that_is_allocated_again_is_dropped():
    tier = make_tier(num_host_blocks=1)
    tier.pool.drop(tier.swap_out([DeviceBlockId(0)], [HASH]))
    tier.take_free()
    assert send(tier).swap_out_src == []


def test_a_content_is_stored_once_and_unnamed_blocks_each_time():
    tier = make_tier()
    host = tier.pool.allocate(4)
    kept = [tier.disk.keep(*each) for each in zip(host, [HASH, None, HASH, None], strict=True)]
    assert kept == [0, 1, 0, 2]
    assert tier.disk.pool.ref_count(0) == 3, "two that keep it, and the store"
    assert send(tier).disk_store_src == [host[0], host[1], host[3]]


# --- what is not to be trusted --------------------------------------------------------------------


def make_stored(tier):
    """Put the same content into host block 0 and disk block 0; neither is held."""
    host = tier.swap_out([DeviceBlockId(0)], [HASH])
    disk = tier.disk.keep(host[0], HASH)
    send(tier)
    return host, [disk]


def end_of_store(tier, disk):
    tier.disk.answer(outcome(stored_disk_block_ids=disk))
    tier.disk.pool.drop(disk)


def test_distrusted_blocks_are_found_in_no_tier():
    tier = make_tier()
    host, disk = make_stored(tier)
    end_of_store(tier, disk)
    assert (tier.pool.find([HASH]), tier.disk.pool.find([HASH])) == (host, disk)
    tier.forget([bytes(32), HASH])
    assert (tier.pool.find([HASH]), tier.disk.pool.find([HASH])) == ([], [])


def test_distrusted_blocks_are_not_found_when_their_store_ends():
    tier = make_tier()
    _, disk = make_stored(tier)
    tier.forget([HASH])
    end_of_store(tier, disk)
    assert tier.disk.pool.find([HASH]) == []
    assert tier.disk.pool.num_free == 4


def test_distrusted_blocks_are_not_found_when_their_load_ends():
    tier = make_tier()
    host, disk = make_stored(tier)
    end_of_store(tier, disk)
    tier.pool.forget(host)
    other = tier.disk.keep(host[0], OTHER)
    send(tier, 2)
    tier.disk.answer(outcome(stored_disk_block_ids=[other]))
    targets = [tier.take_free(), tier.take_free()]
    for source, target, block_hash in zip([*disk, other], targets, [HASH, OTHER], strict=True):
        tier.disk.load(source, target, block_hash)
    tier.forget([HASH])
    send(tier, 3)
    tier.disk.answer(outcome(loaded_host_block_ids=targets))
    assert (tier.pool.find([HASH]), tier.pool.find([OTHER])) == ([], targets[1:])

"""Sequences on the host, when a scheduler core is replaced."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from takeover_driver import (
    CONFIG,
    Pair,
    assert_all_received,
    lengths,
    long_request,
    make_request,
    prompt_charges,
)

from contract.hashing import extend_chain, root_hash
from scheduler_svc.core.sequence import SeqStatus


def swapped(pair):
    return [seq for seq in pair.core.live if seq.status is SeqStatus.SWAPPED]


def crowd(**changes):
    """Two sequences; the second one has been swapped out."""
    pair = Pair(num_blocks=14, num_host_blocks=16, **changes)
    requests = [long_request(key, num_prompt=18 - key, least=25) for key in range(2)]
    for request in requests:
        pair.submit(request)
    while not swapped(pair):
        pair.step()
    return pair, requests


def swap_out_alone(num_outputs, request=None, **changes):
    """A sequence with `num_outputs` output tokens, and by default 16 of its prompt, which has been
    swapped out."""
    pair = Pair(**({"num_host_blocks": 16} | changes))
    request = request or long_request()
    pair.submit(request)
    pair.step(num_outputs)
    (seq,) = pair.core.running
    pair.core.preemption.preempt(seq, must_swap=True)
    pair.step()
    pair.worker.rows.clear()  # it runs again at once if the device still has all its blocks
    del pair.received.setdefault(0, [])[num_outputs:]
    return pair, request


@pytest.mark.parametrize("caching", [True, False])
def test_a_sequence_that_was_swapped_out_is_swapped_again_with_its_partial_tail(caching):
    pair, requests = crowd(enable_prefix_caching=caching)
    (seq,) = swapped(pair)
    assert seq.num_computed_tokens % CONFIG.block_size
    before = seq.num_computed_tokens
    pair.replace_core()
    num_held = pair.core.takeover.num_held_tokens(pair.again(seq.request))
    assert num_held == (0 if caching else before), "every sequence can find cached blocks"
    for request in requests:
        pair.submit(pair.again(request))
    (seq,) = swapped(pair)
    assert seq.num_computed_tokens == before
    pair.run()
    for request in requests:
        assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
def test_what_was_swapped_out_stands_in_the_queue_with_what_is_left_of_it(caching):
    pair, _ = crowd(enable_prefix_caching=caching)
    (seq,) = swapped(pair)
    pair.replace_core()
    pair.submit(pair.again(seq.request))
    (seq,) = swapped(pair)
    num_left = len(seq.token_ids) - seq.num_computed_tokens
    assert 0 < num_left < len(seq.token_ids)
    assert pair.core.num_queued_tokens == num_left


def test_without_a_prefix_cache_no_other_sequence_finds_swapped_blocks():
    pair, requests = crowd(enable_prefix_caching=False)
    pair.replace_core()
    (other,) = (replace(pair.again(request), request_id="other") for request in requests[1:])
    assert pair.core.takeover.num_held_tokens(other) == 0
    pair.submit(other)
    assert not swapped(pair)
    pair.run(now=20.0)
    load = pair.core.load()
    assert load.num_free_host_blocks + load.num_cached_host_blocks == load.num_host_blocks


def test_without_a_prefix_cache_full_swapped_blocks_are_found_without_a_tail():
    """The router has not received the last computed tokens."""
    pair, requests = crowd(enable_prefix_caching=False)
    (seq,) = swapped(pair)
    num_full, num_in_tail = divmod(seq.num_computed_tokens, CONFIG.block_size)
    pair.replace_core()
    heard = pair.received[seq.seq_key]
    heard[:] = heard[: len(heard) - num_in_tail]
    pair.submit(pair.again(seq.request))
    (seq,) = swapped(pair)
    assert seq.num_computed_tokens == num_full * CONFIG.block_size
    for request in requests:
        if request.first_seq_key != seq.seq_key:
            pair.submit(pair.again(request))
    pair.run()
    for request in requests:
        assert_all_received(pair, request)


def test_with_a_prefix_cache_full_blocks_without_the_tail_are_left_to_admission():
    """The router has received a token less than the tail has."""
    pair, request = swap_out_alone(3)
    pair.replace_core()
    pair.received[0][:] = pair.received[0][:1]
    pair.submit(pair.again(request))
    assert not swapped(pair)
    pair.run()
    assert_all_received(pair, request)


@pytest.mark.parametrize("num_outputs", [3, 4])
def test_behind_windows_a_sequence_that_nearly_fills_its_last_block_is_swapped_again(num_outputs):
    pair, request = swap_out_alone(num_outputs, kv_windows=(None, 8))
    pair.replace_core()
    pair.submit(pair.again(request))
    (seq,) = swapped(pair)
    assert seq.num_computed_tokens == 16 + num_outputs - 1
    pair.run()
    assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 0


@pytest.mark.parametrize(
    ("kv_windows", "num_outputs", "is_found"),
    [((None,), 4, True), ((None, 8), 3, True), ((None, 8), 4, False)],
)
def test_a_sequence_whose_router_is_a_token_behind_is_swapped_again(
    kv_windows, num_outputs, is_found
):
    """Unless the earlier token sees a block that was behind the window of the later one."""
    pair, request = swap_out_alone(num_outputs, kv_windows=kv_windows)
    pair.replace_core()
    pair.received[0].pop()
    pair.submit(pair.again(request))
    assert [seq.num_computed_tokens for seq in swapped(pair)] == [16 + num_outputs - 2] * is_found
    pair.run()
    assert_all_received(pair, request)


def test_a_sequence_whose_kv_takes_all_of_the_host_is_swapped_again():
    pair, request = swap_out_alone(3, num_host_blocks=5)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert len(swapped(pair)) == 1
    pair.run()
    assert_all_received(pair, request)


def store(pair, blocks, *, also_on_host):
    """Move host blocks to the disk, as if the sequence had spilled them."""
    worker = pair.worker
    worker.labels.clear()
    for block in blocks:
        worker.disk.blocks[block] = worker.host[block]
        worker.disk.labels[block] = worker.host_labels[block]
        if not also_on_host:
            del worker.host_labels[block]


@pytest.mark.parametrize("also_on_host", [False, True])
@pytest.mark.parametrize("num_stored", [1, 3, 5])
@pytest.mark.parametrize("kv_windows", [(None,), (None, 8)])
def test_a_sequence_that_had_spilled_comes_back_from_the_disk(kv_windows, num_stored, also_on_host):
    pair, request = swap_out_alone(3, kv_windows=kv_windows, num_disk_blocks=16)
    num_blocks = len(pair.worker.host)
    store(pair, range(num_blocks)[-num_stored:], also_on_host=also_on_host)
    pair.replace_core()
    pair.submit(pair.again(request))
    (seq,) = swapped(pair)
    num_on_disk = 0 if also_on_host else num_stored
    assert seq.num_computed_tokens == 16 + 2
    assert len(seq.host_block_ids) == num_blocks - num_on_disk
    assert len(seq.disk_block_ids) == num_on_disk
    pair.run()
    assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 0


def test_a_tail_on_the_host_does_not_follow_blocks_on_the_disk():
    pair, request = swap_out_alone(3, num_disk_blocks=16)
    store(pair, [3], also_on_host=False)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert not swapped(pair)
    pair.run()
    assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 2


def test_without_a_prefix_cache_swapped_blocks_are_free_afterwards():
    pair, request = swap_out_alone(3, num_disk_blocks=16, enable_prefix_caching=False)
    store(pair, range(5)[-3:], also_on_host=False)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert len(swapped(pair)) == 1
    pair.run()
    assert_all_received(pair, request)
    load = pair.core.load()
    assert load.num_free_host_blocks == load.num_host_blocks
    assert load.num_free_disk_blocks == load.num_disk_blocks


@pytest.mark.parametrize("kv_windows", [(None,), (None, 8)])
def test_a_short_tail_after_few_blocks_is_found(kv_windows):
    prompt = next(p for p in product((0, 1), repeat=3) if lengths(p)[0] > 3)
    pair, request = swap_out_alone(3, make_request(prompt=prompt), kv_windows=kv_windows)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert [seq.num_computed_tokens for seq in swapped(pair)] == [5]
    assert pair.core.load().num_adopted_tokens == 5
    pair.run()
    assert_all_received(pair, request)


def test_behind_windows_full_blocks_are_left_to_admission():
    pair, request = swap_out_alone(1, kv_windows=(None, 8))
    pair.worker.labels.clear()
    pair.replace_core()
    pair.submit(pair.again(request))
    assert not swapped(pair)
    pair.run()
    assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 0


def test_kv_that_is_larger_than_the_host_is_not_swapped():
    pair, request = swap_out_alone(3, num_disk_blocks=16)
    store(pair, range(5)[-2:], also_on_host=False)
    pair.replace_core(num_host_blocks=4)
    pair.submit(pair.again(request))
    assert not swapped(pair)
    pair.run()
    assert_all_received(pair, request)


@pytest.mark.parametrize(
    ("caching", "reads_cache", "is_found"),
    [(True, True, False), (False, True, True), (False, False, False)],
)
def test_the_prompt_of_a_swapped_sequence_of_which_nothing_was_heard(
    caching, reads_cache, is_found
):
    """With a prefix cache admission finds its blocks."""
    request = replace(long_request(), reads_prefix_cache=reads_cache)
    pair, _ = swap_out_alone(3, request, enable_prefix_caching=caching)
    pair.received.clear()
    pair.admitted.clear()
    pair.replace_core()
    pair.submit(request, now=100.0)
    assert [seq.num_computed_tokens for seq in swapped(pair)] == [15] * is_found
    pair.run(now=101.0)
    assert_all_received(pair, request)
    (admitted,) = pair.admitted
    assert admitted.num_cached_tokens == (12 if caching else 0)
    assert admitted.queue_s == (0.0 if is_found else 1.0)


def test_tokens_of_a_lost_tail_are_computed_again():
    pair, request = swap_out_alone(3, enable_prefix_caching=False)
    del pair.worker.host_labels[4]
    pair.replace_core()
    pair.submit(pair.again(request))
    assert [seq.num_computed_tokens for seq in swapped(pair)] == [16]
    pair.run()
    assert_all_received(pair, request)
    assert pair.core.load().num_recomputed_tokens == 2


@pytest.mark.parametrize(("num_computed", "num_left"), [(18, 0), (8, 8)])
def test_a_prompt_whose_kv_the_host_gives_up_is_charged_once(num_computed, num_left):
    settings = {"policy": "fair", "enable_prefix_caching": False}
    num_steps = max(1, num_computed - 15)
    pair, request = swap_out_alone(num_steps, max_num_batched_tokens=num_computed, **settings)
    pair.replace_core()
    pair.submit(pair.again(request))
    charged = prompt_charges(pair)
    assert [seq.num_computed_tokens for seq in swapped(pair)] == [num_computed]
    pair.core.host_room.give_up(*swapped(pair))
    pair.run()
    assert_all_received(pair, request)
    assert sum(charged) == num_left


@pytest.mark.parametrize("num_stored", [0, 1])
def test_no_other_sequence_shares_a_block_whose_last_slot_is_written_again(num_stored):
    pair, request = swap_out_alone(5, num_disk_blocks=16)
    store(pair, range(5 - num_stored, 5), also_on_host=False)
    pair.replace_core()
    pair.received[0].pop()
    again = pair.again(request)
    pair.submit(again)
    assert [seq.num_computed_tokens for seq in swapped(pair)] == [19]
    known = [*request.prompt_token_ids.tolist(), *pair.received[0]]
    pair.submit(make_request(1, [*known, 0], max_tokens=1))
    pair.run()
    assert_all_received(pair, request)
    assert pair.core.load().prefix_cache_hits == 16


def test_behind_windows_the_full_block_of_a_partial_one_stays_cached():
    prompt = next(p for p in product((0, 1), repeat=3) if lengths(p)[0] > 5)
    pair, request = swap_out_alone(5, make_request(prompt=prompt), kv_windows=(8,))
    chain = []
    extend_chain(chain, root_hash(""), np.array([*prompt, *pair.received[0]], np.int32), 4)
    pair.worker.host_labels[9] = chain[1]
    pair.replace_core()
    pair.submit(pair.again(request))
    assert [len(seq.host_block_ids) for seq in swapped(pair)] == [2]
    assert pair.core.tier.pool.find(chain[1:]) == [9]

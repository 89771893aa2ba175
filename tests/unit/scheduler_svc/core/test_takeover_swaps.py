"""Sequences on the host, when a scheduler core is replaced."""

from dataclasses import replace

import pytest
from takeover_driver import CONFIG, Pair, assert_all_received, long_request

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


def swap_out_alone(num_outputs, **changes):
    """A sequence of 16 prompt tokens and `num_outputs` more, which has been swapped out."""
    pair, request = Pair(num_host_blocks=16, **changes), long_request()
    pair.submit(request)
    pair.step(num_outputs)
    (seq,) = pair.core.running
    pair.core.preemption.preempt(seq, must_swap=True)
    pair.step()
    assert len(pair.received[0]) == num_outputs
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

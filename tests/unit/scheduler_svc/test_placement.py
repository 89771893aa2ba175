"""The choice of a worker for a request."""

from dataclasses import dataclass

import numpy as np
import pytest

from contract.hashing import extend_chain, root_hash
from contract.info import Role
from scheduler_svc.core.interface.request import BeamParams, OutputSoFar, Request
from scheduler_svc.workers.placement import (
    MAX_BESIDE_DECODES,
    SEQUENCE_TOKENS,
    Choice,
    PlacementMethod,
    Placer,
    WorkerLoad,
    for_prompts,
    num_known_tokens,
)

BLOCK_SIZE = 4


def make_request(num_tokens=50, n=1, salt="", num_prompt_tokens=2, **changes):
    prompt = np.arange(num_prompt_tokens, dtype=np.int32)
    max_tokens = num_tokens - num_prompt_tokens
    return Request(1, 0, "r", prompt, n, max_tokens, b"", cache_salt=salt, **changes)


@dataclass
class Worker:
    """Has blocks of the prompt 0, 1, 2, …"""

    num_running: int = 0
    num_waiting: int = 0
    max_request_len: int = 5000
    num_queued_tokens: int = 0
    num_cached: int = 0
    salt: str = ""
    block_size: int = BLOCK_SIZE
    is_memory_short: bool = False
    role: Role = Role.BOTH

    def placement_load(self):
        return WorkerLoad(
            *(self.num_running, self.num_waiting, 10, self.max_request_len),
            *(self.num_queued_tokens, self.is_memory_short),
        )

    def num_cached_blocks(self, hashes):
        ours = []
        extend_chain(ours, root_hash(self.salt), np.arange(4096, dtype=np.int32), self.block_size)
        common = [a == b for a, b in zip(hashes, ours[: self.num_cached], strict=False)]
        return sum(common)


def choose(workers, request, placement=PlacementMethod.LEAST_LOADED, *, can_refuse=True):
    choice = Placer(placement).choose(request, workers, can_refuse=can_refuse)
    return None if choice is None else choice.index


class TestCandidates:
    @pytest.mark.parametrize("placement", PlacementMethod)
    def test_a_worker_whose_memory_is_short_comes_last(self, placement):
        pressed = Worker(0, 1, num_cached=12, is_memory_short=True)
        assert choose([pressed, Worker(8, 4)], make_request(), placement) == 1
        assert choose([pressed, Worker(8, 10)], make_request(), placement) == 0, "else it is full"

    def test_a_worker_whose_memory_is_short_does_not_run_dry(self):
        pressed = Worker(0, 0, is_memory_short=True)
        assert choose([pressed, Worker(8, 0)], make_request()) == 1
        assert choose([pressed, Worker(8, 4)], make_request()) == 0

    def test_full_queue_is_passed_over(self):
        assert choose([Worker(0, 9), Worker(64, 8)], make_request(n=2)) == 1

    def test_no_room_anywhere(self):
        assert choose([Worker(0, 9)], make_request(n=2)) is None

    def test_accepted_request_goes_where_there_is_no_room(self):
        workers = [Worker(0, 12), Worker(0, 10)]
        assert choose(workers, make_request(n=2), can_refuse=False) == 1

    @pytest.mark.parametrize("can_refuse", [False, True])
    def test_worker_that_takes_no_such_length_is_passed_over(self, can_refuse):
        workers = [Worker(0, 0, 50), Worker(9, 0, 51)]
        assert choose(workers, make_request(51), can_refuse=can_refuse) == 1
        assert choose(workers, make_request(50), can_refuse=can_refuse) == 0

    def test_request_too_long_for_all_goes_where_the_limit_is_highest(self):
        workers = [Worker(0, 0, 50), Worker(9, 0, 51), Worker(0, 0, 9)]
        assert choose(workers, make_request(99)) == 1


class TestLeastLoaded:
    def test_fewest_sequences_waiting_or_running(self):
        assert choose([Worker(5, 1), Worker(1, 4), Worker(6, 0)], make_request()) == 1

    def test_first_of_equals(self):
        assert choose([Worker(2, 2), Worker(4, 0)], make_request()) == 0


def test_round_robin_takes_each_in_turn():
    placer = Placer(PlacementMethod.ROUND_ROBIN)
    workers = [Worker(9), Worker(), Worker(0, 10)]
    chosen = [placer.choose(make_request(), workers, can_refuse=True).index for _ in range(4)]
    assert sorted(chosen[:2]) == [0, 1]
    assert chosen[2:] == chosen[:2]


class TestPrefix:
    @staticmethod
    def choose(workers, **request):
        request = make_request(4000, **{"num_prompt_tokens": 2049, **request})
        return choose(workers, request, PlacementMethod.PREFIX)

    def test_where_most_of_the_prompt_is_cached(self):
        assert self.choose([Worker(), Worker(num_cached=100), Worker(num_cached=99)]) == 1

    def test_nothing_cached_means_least_loaded(self):
        assert self.choose([Worker(3), Worker(2), Worker(2)]) == 1

    def test_cached_prefix_is_worth_so_many_sequences_and_not_more(self):
        worth = 2048 // SEQUENCE_TOKENS
        assert self.choose([Worker(), Worker(worth - 1, num_cached=512)]) == 1
        assert self.choose([Worker(), Worker(worth + 1, num_cached=512)]) == 0

    def test_tokens_queued_there_count_as_those_of_its_own(self):
        assert self.choose([Worker(), Worker(num_queued_tokens=2047, num_cached=512)]) == 1
        assert self.choose([Worker(), Worker(num_queued_tokens=2049, num_cached=512)]) == 0

    def test_says_how_much_is_left_to_compute(self):
        request = make_request(4000, num_prompt_tokens=2049)
        choice = Placer().choose(request, [Worker(), Worker(num_cached=100)], can_refuse=True)
        assert choice == Choice(1, 2049 - 100 * BLOCK_SIZE)

    def test_salts_share_nothing(self):
        workers = [Worker(), Worker(num_cached=512)]
        assert self.choose(workers, salt="other") == 0
        workers[1].salt = "other"
        assert self.choose(workers, salt="other") == 1

    def test_last_token_is_never_counted_as_cached(self):
        workers = [Worker(), Worker(num_cached=512)]
        asked = []
        workers[0].num_cached_blocks = lambda hashes: asked.append(len(hashes)) or 0
        self.choose(workers, num_prompt_tokens=2048)
        assert asked == [511]

    def test_request_that_does_not_read_the_cache_gains_nothing_from_it(self):
        assert self.choose([Worker(), Worker(1, num_cached=512)], reads_prefix_cache=False) == 0

    def test_workers_with_blocks_of_another_size_have_hashes_of_their_own(self):
        assert self.choose([Worker(), Worker(num_cached=100, block_size=8)]) == 1


def test_known_tokens_of_outputs_that_go_on():
    request = make_request(n=3)
    assert num_known_tokens(request) == 2
    lens = [OutputSoFar(np.zeros(5, np.int32), finished=False)] * 2
    ended = OutputSoFar(np.zeros(9, np.int32), finished=True)
    assert num_known_tokens(make_request(n=3, outputs=(*lens, ended))) == 14


class TestRoles:
    """Prompts go to workers that prefill, if there are any."""

    @pytest.mark.parametrize("placement", PlacementMethod)
    def test_a_prompt_goes_to_a_worker_that_prefills(self, placement):
        workers = [Worker(role=Role.DECODE), Worker(9, 9, role=Role.PREFILL)]
        assert choose(workers, make_request(), placement) == 1
        workers[1].role = Role.BOTH
        assert choose(workers, make_request(), placement) == 1
        assert for_prompts(workers) == [workers[1]]

    def test_full_prefill_workers_do_not_spill_to_decode_workers(self):
        workers = [Worker(role=Role.DECODE), Worker(0, 10, role=Role.PREFILL)]
        assert choose(workers, make_request()) is None
        assert choose(workers, make_request(), can_refuse=False) == 1

    def test_without_prefill_workers_the_others_take_prompts(self):
        workers = [Worker(5, role=Role.DECODE), Worker(3, role=Role.DECODE)]
        assert choose(workers, make_request()) == 1
        assert for_prompts(workers) == workers

    @pytest.mark.parametrize(
        ("num_lacking", "num_at_prefill", "expected"),
        [(9, 0, 0), (9, 900, 1), (MAX_BESIDE_DECODES - 3, 0, 0), (MAX_BESIDE_DECODES + 1, 0, 1)],
    )
    def test_a_decode_worker_keeps_a_conversation(self, num_lacking, num_at_prefill, expected):
        num_prompt_tokens = 2001
        num_cached = (num_prompt_tokens - num_lacking) // BLOCK_SIZE
        workers = [
            Worker(200, role=Role.DECODE, num_cached=num_cached),
            Worker(role=Role.PREFILL, num_cached=num_at_prefill),
        ]
        request = make_request(2100, num_prompt_tokens=num_prompt_tokens)
        assert choose(workers, request, PlacementMethod.PREFIX) == expected

    def test_a_search_goes_where_it_can_stay(self):
        workers = [Worker(role=Role.PREFILL), Worker(9, role=Role.DECODE)]
        search = make_request(beam=BeamParams(width=2, end_token_ids=()))
        assert choose(workers, search) == 1
        assert choose(workers[:1], search) == 0

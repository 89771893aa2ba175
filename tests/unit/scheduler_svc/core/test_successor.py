"""What a scheduler core takes over from the one before, through a worker that remembers its KV."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.beam_search import BeamParams
from scheduler_svc.core.block_hash import extend_chain, root_hash
from scheduler_svc.core.block_pool import BlockPool, DeviceBlockId
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.holdings import Holdings, identity
from scheduler_svc.core.invariants import check
from scheduler_svc.core.new_labels import NewLabels
from scheduler_svc.core.plan import Finished
from scheduler_svc.core.request import FinishReason, OutputSoFar, Request, SeqKey, SourceId
from scheduler_svc.core.sequence import SeqStatus
from scheduler_svc.core.successor import Successor
from tests.property.beams import expected_search
from tests.property.oracle import expected_output
from tests.property.worker import SEARCH, FakeWorker, log_of

CONFIG = SchedulerConfig(
    num_blocks=32,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    watermark=0.0,
    claim_s=10.0,
    preemption_mode=PreemptionMode.SWAP,
)
PROMPT = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0]
MAX_TOKENS = 30


class Pair:
    """A worker and its scheduler core, which may be replaced."""

    def __init__(self, **changes):
        self.config = replace(CONFIG, **changes)
        self.worker = FakeWorker(self.config)
        self.core = Successor(self.config)
        self.heard: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.ends: list[Finished] = []
        self.unheard = 0

    def submit(self, request, now=0.0):
        self.core.submit(request, now)
        self._hear(self.core.take_adopted())
        check(self.core)

    def step(self, num_steps=1, *, is_heard=True, now=0.0):
        for _ in range(num_steps):
            if (plan := self.core.schedule(now)) is None:
                return
            outcome = self.worker.execute(plan)
            if is_heard:
                self._hear(self.core.update(outcome))
            check(self.core)

    def run(self, now=0.0):
        while list(self.core._live) or self.core._running.must_send:
            self.step(now=now)

    def replace_core(self, now=0.0, **changes):
        self.core = Successor(replace(self.config, **changes))
        self.core.inherit(self.worker.hand_over(), now)
        check(self.core)

    def again(self, request):
        """The request as its router submits it, with what it has heard."""
        heard = [self.heard.get(request.first_seq_key + i, []) for i in range(request.n)]
        outputs = tuple(OutputSoFar(np.array(ids, np.int32), finished=False) for ids in heard)
        return replace(request, outputs=outputs)

    def _hear(self, news):
        if news is None:
            return
        for key, token in zip(news.seq_keys.tolist(), news.token_ids.tolist(), strict=True):
            self.heard.setdefault(key, []).append(token)
        self.reasons.update((end.seq_key, end.reason) for end in news.finished)
        self.ends += news.finished


def make_request(key=0, prompt=PROMPT, n=1, **fields):
    fields = {"request_id": f"r{key}", "max_tokens": MAX_TOKENS, "sampling": b""} | fields
    return Request(
        SourceId(1), SeqKey(key), prompt_token_ids=np.array(prompt, np.int32), n=n, **fields
    )


def assert_all_heard(pair, request):
    for index in range(request.n):
        expected = expected_output("", index, request.prompt_token_ids.tolist(), MAX_TOKENS)
        assert pair.heard[request.first_seq_key + index] == expected


def long_request(key=0, n=1, *, num_prompt=16, least=10):
    """One whose outputs do not end soon."""
    num_more = num_prompt - len(PROMPT)
    prompts = ([*PROMPT, *map(int, f"{tail:0{num_more}b}")] for tail in range(2**num_more))
    return make_request(key, next(p for p in prompts if min(lengths(p, n)) >= least), n)


def lengths(prompt, n=1):
    return [len(expected_output("", index, prompt, MAX_TOKENS)) for index in range(n)]


def num_outputs(request):
    return sum(lengths(request.prompt_token_ids.tolist(), request.n))


def test_a_sequence_runs_on_where_it_was_and_computes_nothing_again():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    assert pair.core.num_held_tokens(pair.again(request)) == 16 + 5
    pair.submit(pair.again(request))
    assert not pair.core.unclaimed
    pair.run()
    assert_all_heard(pair, request)
    num_left = num_outputs(request) - 6
    assert pair.worker.num_computed_tokens - num_computed == num_left
    assert pair.core.load().num_recomputed_tokens == 0


def test_tokens_that_nobody_heard_of_are_told_and_not_drawn_again(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)  # no log-probabilities
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(4)
    pair.step(2, is_heard=False)
    num_computed = pair.worker.num_computed_tokens
    assert len(pair.heard[0]) == 4
    pair.replace_core()
    pair.submit(pair.again(request))
    assert len(pair.heard[0]) == 6
    pair.run()
    assert_all_heard(pair, request)
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - 6


def test_tokens_whose_log_probabilities_are_lost_are_drawn_again(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 0)
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(4)
    pair.step(2, is_heard=False)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert len(pair.heard[0]) == 4
    pair.run()
    assert_all_heard(pair, request)
    assert pair.core.load().num_recomputed_tokens == 2


def test_tokens_whose_log_probabilities_are_kept_are_told_with_them(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 4 * 3)  # of three tokens
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(4)
    pair.step(2, is_heard=False)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    pair.core.submit(pair.again(request), 0.0)
    news = pair.core.take_adopted()
    assert len(news.token_ids) == 2
    assert news.logprobs == tuple((i, log_of(16 + 4 + i)) for i in range(2))
    assert news.result_index.tolist() == [0, 1]
    pair._hear(news)
    pair.run()
    assert_all_heard(pair, request)
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - 6


def test_a_sequence_that_stopped_unheard_ends(monkeypatch):
    monkeypatch.setattr("tests.property.worker.crc32", lambda _: 1)
    prompts = ([*PROMPT, *map(int, f"{tail:06b}")] for tail in range(64))
    prompt = next(p for p in prompts if len(expected_output("", 0, p, MAX_TOKENS)) == 3)
    pair, request = Pair(), make_request(prompt=prompt)
    pair.submit(request)
    pair.step(2)
    pair.step(1, is_heard=False)
    pair.replace_core()
    pair.submit(pair.again(request))
    assert_all_heard(pair, request)
    assert pair.reasons == {0: FinishReason.STOP}
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks


def test_outputs_that_share_their_prompt_share_it_still():
    pair, request = Pair(), long_request(n=3)
    pair.submit(request)
    pair.step(6)
    num_free = pair.core.load().num_free_blocks + pair.core.load().num_cached_blocks
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    pair.submit(pair.again(request))
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks >= num_free - 3
    pair.run()
    assert_all_heard(pair, request)
    num_had = sum(6 - (index > 0) for index in range(3))  # siblings start a step later
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - num_had


def test_outputs_of_which_nothing_was_heard_are_adopted_each():
    pair, request = Pair(), long_request(n=2)
    pair.submit(request)
    pair.step(3, is_heard=False)
    pair.step(1, is_heard=False)
    pair.replace_core()
    assert len(pair.core.unclaimed) == 2
    pair.submit(request)
    assert not pair.core.unclaimed
    pair.run()
    assert_all_heard(pair, request)


def test_a_prompt_that_was_half_computed_goes_on_from_there():
    pair = Pair(max_num_batched_tokens=8)
    request = long_request()
    pair.submit(request)
    pair.step(1)
    pair.replace_core()
    pair.submit(request)
    pair.run()
    assert_all_heard(pair, request)
    num_prompt = len(request.prompt_token_ids)
    assert pair.worker.num_computed_tokens == num_prompt + num_outputs(request) - 1


def test_the_prefix_cache_is_as_it_was():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.run()
    pair.replace_core()
    assert pair.core.load().num_cached_blocks > 0
    pair.submit(make_request(1, [*request.prompt_token_ids.tolist(), 0, 1]))
    pair.step(2)
    assert pair.core.load().prefix_cache_hits == 16


def test_pins_stay_for_the_rest_of_their_time_and_outlive_newer_prompts():
    pair, request = Pair(num_blocks=12), make_request(max_tokens=1, cache_pin_s=20.0)
    pair.submit(request, now=100.0)
    pair.run(now=100.0)
    pair.worker.pins = {name: left_s - 5.0 for name, left_s in pair.worker.pins.items()}
    pair.replace_core(now=1005.0)
    assert pair.core.load().num_pinned_blocks == len(PROMPT) // 4
    pair.submit(make_request(1, [1] * 40, max_tokens=1))
    pair.run(now=1006.0)
    pair.submit(make_request(2, [*PROMPT, 1], max_tokens=1))
    pair.step(now=1019.0)
    assert pair.core.load().prefix_cache_hits == 8
    pair.step(now=1020.0)
    assert pair.core.load().num_pinned_blocks == 0


def test_rows_that_nobody_has_claimed_give_way_to_a_search_and_pins_do_not():
    pair, pinned = Pair(max_num_seqs=3), make_request(max_tokens=1, cache_pin_s=20.0)
    pair.submit(pinned)
    pair.run()
    pair.submit(long_request(1))
    pair.step(2)
    pair.replace_core()
    assert len(pair.core.unclaimed) == 1
    pair.submit(make_request(2, **SEARCHES))
    pair.step()
    assert not pair.core.unclaimed
    assert pair.core.load().num_pinned_blocks == 2


def test_of_more_pins_than_the_quota_those_that_end_last_stay_and_of_them_the_beginning():
    pair, prompts = Pair(max_pinned_share=1.0), ([0] * 8, [1] * 8)
    for key, (prompt, pin_s) in enumerate(zip(prompts, (30.0, 20.0), strict=True)):
        pair.submit(make_request(key, prompt, max_tokens=1, cache_pin_s=pin_s))
        pair.run()
    pair.replace_core(max_pinned_share=3 / 32)
    pinned = {pair.core._pool._hashes[block] for block in pair.core._pins._ends}
    chains = [[], []]
    for chain, prompt in zip(chains, prompts, strict=True):
        extend_chain(chain, root_hash(""), np.array(prompt, np.int32), 4)
    assert pinned == {*chains[0], chains[1][0]}


def test_a_prompt_pinned_anew_is_told_anew():
    pair = Pair()
    for key, pin_s in enumerate([10.0, 5.0, 30.0]):
        pair.submit(make_request(key, max_tokens=1, cache_pin_s=pin_s))
        pair.run()
    assert [*pair.worker.pins.values()] == [30.0, 30.0]


def test_without_a_prefix_cache_sequences_run_on_all_the_same():
    pair, request = Pair(enable_prefix_caching=False), long_request()
    pair.submit(request)
    pair.step(6)
    num_computed = pair.worker.num_computed_tokens
    pair.replace_core()
    pair.submit(pair.again(request))
    pair.run()
    assert_all_heard(pair, request)
    assert pair.worker.num_computed_tokens - num_computed == num_outputs(request) - 6


def swapped(pair):
    return [seq for seq in pair.core._live if seq.status is SeqStatus.SWAPPED]


def crowd(**changes):
    """Two sequences, the second of which has been swapped out."""
    pair = Pair(num_blocks=14, num_host_blocks=16, **changes)
    requests = [long_request(key, num_prompt=18 - key, least=25) for key in range(2)]
    for request in requests:
        pair.submit(request)
    while not swapped(pair):
        pair.step()
    return pair, requests


@pytest.mark.parametrize("caching", [True, False])
def test_a_sequence_that_was_swapped_out_is_swapped_again_with_its_partial_tail(caching):
    pair, requests = crowd(enable_prefix_caching=caching)
    (seq,) = swapped(pair)
    assert seq.num_computed_tokens % CONFIG.block_size
    before = seq.num_computed_tokens
    pair.replace_core()
    num_held = pair.core.num_held_tokens(pair.again(seq.request))
    assert num_held == (0 if caching else before), "what the prefix cache has, anybody finds"
    for request in requests:
        pair.submit(pair.again(request))
    (seq,) = swapped(pair)
    assert seq.num_computed_tokens == before
    pair.run()
    for request in requests:
        assert_all_heard(pair, request)
    assert pair.core.load().num_recomputed_tokens == 0


def test_without_a_prefix_cache_nobody_else_finds_what_was_swapped_out():
    pair, requests = crowd(enable_prefix_caching=False)
    pair.replace_core()
    (other,) = (replace(pair.again(request), request_id="other") for request in requests[1:])
    assert pair.core.num_held_tokens(other) == 0
    pair.submit(other)
    assert not swapped(pair)
    pair.run(now=20.0)
    load = pair.core.load()
    assert load.num_free_host_blocks + load.num_cached_host_blocks == load.num_host_blocks


def test_without_a_prefix_cache_the_full_blocks_of_what_was_swapped_out_are_found_without_a_tail():
    """Its router has not heard of the last tokens that were computed."""
    pair, requests = crowd(enable_prefix_caching=False)
    (seq,) = swapped(pair)
    num_full, num_in_tail = divmod(seq.num_computed_tokens, CONFIG.block_size)
    pair.replace_core()
    heard = pair.heard[seq.seq_key]
    heard[:] = heard[: len(heard) - num_in_tail]
    pair.submit(pair.again(seq.request))
    (seq,) = swapped(pair)
    assert seq.num_computed_tokens == num_full * CONFIG.block_size
    for request in requests:
        if request.first_seq_key != seq.seq_key:
            pair.submit(pair.again(request))
    pair.run()
    for request in requests:
        assert_all_heard(pair, request)


SEARCHES = {"max_tokens": 24, "sampling": SEARCH, "beam": BeamParams(3, (), 1.0)}


def search(pair, num_kills=0, every=7):
    """Take a search to its end, through deaths of the scheduler; return what it found."""
    request = make_request(n=2, **SEARCHES)
    pair.submit(request)
    for _ in range(num_kills):
        pair.step(every)
        assert not pair.ends, "it has not ended yet"
        pair.replace_core()
        assert pair.core.num_held_tokens(request) >= len(PROMPT)
        pair.submit(pair.again(request))
    pair.run()
    return [(end.seq_key, end.reason, end.token_ids, end.cumulative_logprob) for end in pair.ends]


@pytest.mark.parametrize("every", [5, 6])
def test_a_search_goes_on_where_it_was(every):
    unfailed, failed = Pair(), Pair()
    expected = search(unfailed)
    assert expected[0][2] == expected_search("", PROMPT, SEARCHES["beam"], 24, 0)[0].tokens
    assert search(failed, 3, every) == expected
    num_more = failed.worker.num_computed_tokens - unfailed.worker.num_computed_tokens
    assert 0 <= num_more <= 3 * 3 * CONFIG.block_size, "of each beam a block that has no name yet"
    load = failed.core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks


def test_a_search_whose_note_does_not_fit_starts_anew():
    pair, request = Pair(), make_request(n=2, **SEARCHES)
    expected = search(Pair())
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    wide = replace(row.search, beams=row.search.beams * 2)
    pair.core = Successor(pair.config)
    pair.core.inherit(replace(held, rows=(replace(row, search=wide),)), 0.0)
    pair.submit(request)
    pair.run()
    assert [end.token_ids for end in pair.ends] == [found[2] for found in expected]


@pytest.mark.parametrize(
    "changes", [{"beam": BeamParams(3, (), 2.0)}, {"min_tokens": 1}, {"max_tokens": 23}]
)
def test_another_search_of_that_name_does_not_go_on_with_its_beams(changes):
    pair, request = Pair(), make_request(n=2, **SEARCHES)
    pair.submit(request)
    pair.step(6)
    pair.replace_core()
    assert pair.core.num_held_tokens(request)
    assert not pair.core.num_held_tokens(replace(request, **changes))


def test_what_nobody_claims_is_free_after_a_time_and_stays_cached():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    pair.replace_core(now=100.0)
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks < load.num_blocks
    assert pair.core.schedule(109.0) is None
    assert len(pair.core.unclaimed) == 1
    assert pair.core.schedule(110.0) is None
    check(pair.core)
    load = pair.core.load()
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks
    assert load.num_cached_blocks > 0


def test_what_nobody_claims_gives_way_to_who_could_not_run_otherwise():
    pair, request = Pair(num_blocks=12), long_request()
    pair.submit(request)
    pair.step(6)
    pair.replace_core()
    other = make_request(1, [1] * 33, max_tokens=1)
    pair.submit(other)
    pair.step()
    assert not pair.core.unclaimed
    assert 1 in pair.heard


def test_another_request_of_that_name_does_not_get_its_tokens():
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    pair.replace_core()
    others = (
        replace(request, sampling=b"other"),
        replace(request, cache_salt="other"),
        replace(request, tenant="other"),
        replace(request, request_id="other"),
        replace(request, max_tokens=MAX_TOKENS + 1),
        replace(request, prompt_token_ids=1 - request.prompt_token_ids),
    )
    assert pair.core.num_held_tokens(request)
    assert not any(map(pair.core.num_held_tokens, others))
    assert identity(request, 0) != identity(request, 1)


def test_a_block_that_two_rows_claim_to_write_is_copied():
    """A worker that lies, or a block that somebody found by its hash."""
    pair, request = Pair(), long_request()
    pair.submit(request)
    pair.step(6)
    held = pair.worker.hand_over()
    (row,) = held.rows
    lie = replace(row, identity=b"x" * 32)
    pair.core = Successor(pair.config)
    pair.core.inherit(Holdings((row, lie), held.device), 0.0)
    pair.submit(pair.again(request))
    plan = pair.core.schedule(0.0)
    assert plan.copy_src_block_ids.tolist() == [row.block_ids[-1]]
    check(pair.core)


class TestRestore:
    def test_what_became_known_last_is_evicted_first(self):
        pool = BlockPool(4, DeviceBlockId)
        pool.restore([[1]], [2, 1, 3], [b"a", b"b", b"c"])
        assert (pool.num_blank, pool.num_cached, pool.ref_count(1)) == (1, 2, 1)
        assert pool.find([b"a", b"b", b"c"]) == [2, 1, 3]
        assert pool.allocate(3) == [0, 3, 2]

    def test_of_two_blocks_with_one_content_the_older_is_kept(self):
        pool = BlockPool(4, DeviceBlockId)
        pool.restore([], [2, 1], [b"a", b"a"])
        assert pool.find([b"a"]) == [2]
        assert pool.num_blank == 3


class TestNewLabels:
    def test_what_a_step_computes_is_told_with_the_one_after_it(self):
        labels = NewLabels()
        labels.give([1], [bytes(32)])
        labels.begin_step()
        labels.give([2], [bytes(31) + b"2"])
        assert labels.take()[0].tolist() == [1]
        assert labels.take()[0].tolist() == []
        labels.begin_step()
        blocks, names = labels.take()
        assert blocks.tolist() == [2]
        assert names[0, 31] == ord("2")

    def test_what_moves_in_the_step_is_named_where_it_will_be(self):
        labels = NewLabels()
        labels.give([1], [bytes(32)])
        labels.begin_step()
        labels.give([1], [bytes(32)])
        labels.give([5], [bytes(32)])
        labels.exchange(1, 5)
        assert labels.take()[0].tolist() == [1], "before the step it was here"
        labels.begin_step()
        assert labels.take()[0].tolist() == [5, 1]

    def test_what_is_not_to_be_trusted_is_not_named(self):
        labels = NewLabels()
        for block in (1, 2):
            labels.give([block], [bytes(32)])
        labels.begin_step()
        labels.give([3], [bytes(32)])
        labels.forget({1, 3})
        assert labels.take()[0].tolist() == [2]
        labels.begin_step()
        assert labels.take()[0].tolist() == []

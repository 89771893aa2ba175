"""A request between its reader and a scheduler: events, ends, stops, cancels, deadlines."""

import asyncio

import grpc
import pytest
from router_fake_scheduler import EOS, ERROR, LENGTH, MAX_MODEL_LEN, STOP, FakeScheduler

from contract.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    TooBusyError,
    UnavailableError,
)
from contract.outputs import (
    FinishReason,
    OutputDelta,
    OutputError,
    OutputFinished,
    TokenLogprob,
    Usage,
)
from contract.request import GenerateRequest
from contract.sampling import SamplingParams
from quire.v1 import common_pb2
from router.live import output


async def start(router, **kwargs):
    """Submits a request; returns it and the scheduler's `Submit`."""
    kwargs.setdefault("prompt", (5, 6, 7))
    live = await router.inference.generate(GenerateRequest(**kwargs))
    return live, await router.scheduler.submits.get()


async def text_of(live, index=0):
    return "".join(
        [
            event.text
            async for event in live
            if isinstance(event, OutputDelta) and event.output_index == index
        ]
    )


async def settled(router):
    """Returns when the router has received all messages of the scheduler."""
    live, submit = await start(router, request_id="settled")
    async with live:
        await router.scheduler.step(finished={submit.first_seq_key: LENGTH})
        assert isinstance(await anext(live), OutputFinished)


async def test_a_request_streams_deltas_then_one_end_then_usage(router):
    live, submit = await start(router, prompt="hello", request_id="r1")
    key = submit.first_seq_key
    tokens = router.tokens(" wörld 🙂!")
    await router.scheduler.step({key: tokens[:1]}, admitted={key: 4})
    first = await anext(live)
    assert (first.output_index, first.token_offset, first.token_ids) == (0, 0, (tokens[0],))
    await router.scheduler.step({key: tokens[1:]}, finished={key: LENGTH})
    *deltas, finished, usage = [event async for event in live]
    assert first.text + "".join(delta.text for delta in deltas) == " wörld 🙂!"
    assert [t for d in (first, *deltas) for t in d.token_ids] == tokens
    assert deltas[0].token_offset == 1
    assert finished == OutputFinished(0, FinishReason.LENGTH)
    assert usage == Usage(len(live.prompt_token_ids), len(tokens), 2)
    assert (live.request_id, live.model) == ("r1", "tiny")


async def test_usage_says_how_much_of_the_prompt_is_pinned(router):
    live, submit = await start(router, n=2, cache_pin_s=60.0)
    assert submit.cache_pin_s == 60.0
    key = submit.first_seq_key
    # Its siblings fork from the first output, and pin the same blocks.
    await router.scheduler.step({key: [5]}, pinned={key: 32, key + 1: 32}, finished={key: LENGTH})
    await router.scheduler.step(finished={key + 1: LENGTH})
    *_, usage = [event async for event in live]
    assert usage.pinned_tokens == 32


async def test_a_prompt_is_pinned_though_its_first_token_ends_it(router):
    live, submit = await start(router, stop=("!",), cache_pin_s=60.0)
    key = submit.first_seq_key
    await router.scheduler.step({key: router.tokens("!")}, pinned={key: 16})
    *_, usage = [event async for event in live]
    assert usage.pinned_tokens == 16


async def test_the_scheduler_is_told_everything_that_decides_the_outcome(router):
    sampling = SamplingParams(temperature=0.5, top_k=3, logit_bias={4: -1.0}, stop_token_ids=(9,))
    live, submit = await start(router, sampling=sampling, n=2, cache_salt="s")
    async with live:
        assert submit.request_id == live.request_id != ""
        assert submit.prompt_token_ids == b"\5\0\0\0\6\0\0\0\7\0\0\0"
        assert (submit.n, submit.cache_salt) == (2, "s")
        assert submit.sampling.max_tokens == MAX_MODEL_LEN - 3
        assert submit.sampling.HasField("seed")
        assert submit.sampling.seed < 2**63
        assert submit.sampling.temperature == 0.5
        assert dict(submit.sampling.logit_bias) == {4: -1.0}
        assert not submit.outputs


async def test_a_seed_that_is_given_is_kept_and_others_differ(router):
    lives = [
        await start(router, sampling=SamplingParams(seed=seed)) for seed in (2**64 - 1, None, None)
    ]
    seeds = [submit.sampling.seed for _, submit in lives]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 3
    for live, _ in lives:
        await live.aclose()


async def test_outputs_have_indexes_and_each_ends_once(router):
    live, submit = await start(router, n=3)
    first = submit.first_seq_key
    a, b = router.tokens("a")[0], router.tokens("b")[0]
    await router.scheduler.step({first: [a], first + 2: [b, b]}, finished={first + 1: LENGTH})
    await router.scheduler.step({first: [a]}, finished={first: LENGTH, first + 2: LENGTH})
    events = [event async for event in live]
    assert events[-1] == Usage(3, 4, 0)
    texts = ["", "", ""]
    for event in events[:-1]:
        if isinstance(event, OutputDelta):
            texts[event.output_index] += event.text
    assert texts == ["aa", "", "bb"]
    ends = [e.output_index for e in events if isinstance(e, OutputFinished)]
    assert sorted(ends) == [0, 1, 2]


async def test_tokens_that_wait_for_the_reader_are_merged_into_one_delta(router):
    live, submit = await start(router)
    tokens = router.tokens("one two three four five")
    for token in tokens:
        await router.scheduler.step({submit.first_seq_key: [token]})
    await settled(router)
    async with live:
        delta = await anext(live)
    assert delta == OutputDelta(0, 0, tuple(tokens), "one two three four five")


async def test_tokens_beyond_one_delta_wait_for_no_further_token(router, monkeypatch):
    monkeypatch.setattr(output, "MAX_EVENT_TOKENS", 3)
    live, submit = await start(router)
    async with live:
        for token in range(70, 78):
            await router.scheduler.step({submit.first_seq_key: [token]})
        await settled(router)
        deltas = [(await anext(live)).token_ids for _ in range(3)]
    assert deltas == [(70, 71, 72), (73, 74, 75), (76, 77)]


async def test_an_absent_reader_delays_no_stream_and_costs_only_its_tokens(router):
    lazy, lazy_submit = await start(router)
    live, submit = await start(router)
    token = router.tokens("a")[0]
    for _ in range(MAX_MODEL_LEN - 3):
        await router.scheduler.step(
            {lazy_submit.first_seq_key: [token], submit.first_seq_key: [token]}
        )
    await router.scheduler.step(finished={submit.first_seq_key: LENGTH})
    assert await text_of(live) == "a" * (MAX_MODEL_LEN - 3)
    assert len(lazy.outputs_with_events) == 1  # one pending delta, not one event per token
    await lazy.aclose()


async def test_logprobs_stay_with_their_tokens(router):
    live, submit = await start(router, sampling=SamplingParams(logprobs=1))
    logprobs = [
        common_pb2.TokenLogprob(logprob=-i, top_token_ids=[i], top_logprobs=[-0.5]) for i in (1, 2)
    ]
    await router.scheduler.step({submit.first_seq_key: [70, 71]}, logprobs=logprobs)
    async with live:
        delta = await anext(live)
    assert delta.logprobs == (
        TokenLogprob(-1.0, ((1, -0.5),)),
        TokenLogprob(-2.0, ((2, -0.5),)),
    )


async def test_the_text_of_the_end_token_is_not_shown_and_its_id_is(router):
    live, submit = await start(router)
    token = router.tokens("a")[0]
    await router.scheduler.step(
        {submit.first_seq_key: [token, EOS]},
        finished={submit.first_seq_key: STOP},
        stop_token_id=EOS,
    )
    delta, finished, usage = [event async for event in live]
    assert (delta.token_ids, delta.text) == ((token, EOS), "a")
    assert finished == OutputFinished(0, FinishReason.STOP)  # eos is not a stop_token_id
    assert usage.completion_tokens == 2


async def test_a_stop_token_is_named_and_its_text_is_not_shown(router):
    a, b = router.tokens("a")[0], router.tokens("b")[0]
    live, submit = await start(router, sampling=SamplingParams(stop_token_ids=(b,)))
    await router.scheduler.step(
        {submit.first_seq_key: [a, b]}, finished={submit.first_seq_key: STOP}, stop_token_id=b
    )
    delta, finished, _ = [event async for event in live]
    assert (delta.token_ids, delta.text) == ((a, b), "a")
    assert finished == OutputFinished(0, FinishReason.STOP, stop_token_id=b)


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xab")])
async def test_a_stop_string_across_steps_ends_the_output_and_cancels_the_sequence(
    router, include, text
):
    live, submit = await start(router, stop=("ab",), include_stop_str_in_output=include)
    key = submit.first_seq_key
    x, a, b = (router.tokens(c)[0] for c in "xab")
    await router.scheduler.step({key: [x, a]})
    delta = await anext(live)
    assert (delta.token_ids, delta.text) == ((x, a), "x")  # "a" may begin the stop string
    await router.scheduler.step({key: [b, x]})
    assert await router.scheduler.cancels.get() == [key]
    await router.scheduler.step({key: [x]}, finished={key: common_pb2.FINISH_REASON_CANCELLED})
    await settled(router)
    rest, finished, usage = [event async for event in live]
    assert (rest.token_ids, delta.text + rest.text) == ((b,), text)
    assert finished == OutputFinished(0, FinishReason.STOP, stop_string="ab")
    assert usage.completion_tokens == 3


async def test_a_stop_string_is_found_without_a_reader(router):
    live, submit = await start(router, stop=("b",))
    await router.scheduler.step({submit.first_seq_key: router.tokens("b")})
    assert await router.scheduler.cancels.get() == [submit.first_seq_key]
    await live.aclose()


async def test_text_held_back_for_a_stop_string_comes_with_the_end(router):
    live, submit = await start(router, stop=("ab!",))
    tokens = router.tokens("xab")
    await router.scheduler.step(
        {submit.first_seq_key: tokens}, finished={submit.first_seq_key: LENGTH}
    )
    assert await text_of(live) == "xab"


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue holds 8 requests", TooBusyError),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt has 60 tokens; it can not fit",
            InvalidArgumentError,
        ),
        (grpc.StatusCode.UNAVAILABLE, "no worker", UnavailableError),
    ],
)
async def test_a_refusal_is_raised_from_the_first_event(router, code, message, error):
    live, submit = await start(router)
    await router.scheduler.refuse(submit.first_seq_key, code, message, retry_after_s=2.5)
    with pytest.raises(error, match=message) as caught:
        await anext(live)
    if error is TooBusyError:
        assert caught.value.retry_after_s == 2.5
    with pytest.raises(StopAsyncIteration):
        await anext(live)
    assert router.scheduler.cancels.empty()


async def test_a_failure_after_acceptance_is_the_end_of_its_output(router):
    live, submit = await start(router)
    await router.scheduler.step({submit.first_seq_key: [70]})
    await router.scheduler.step(
        finished={submit.first_seq_key: ERROR},
        error=common_pb2.OutputError(code=14, message="worker lost", retryable=True),
    )
    *_, finished, usage = [event async for event in live]
    error = OutputError(14, "worker lost", retryable=True)
    assert finished == OutputFinished(0, FinishReason.ERROR, error=error)
    assert usage.completion_tokens == 1


async def test_leaving_the_block_cancels_what_is_live(router):
    live, submit = await start(router, n=2)
    first = submit.first_seq_key
    await router.scheduler.step(finished={first: LENGTH})
    async with live:
        await anext(live)
    assert await router.scheduler.cancels.get() == [first + 1]
    assert [event async for event in live] == []


async def test_a_request_that_ended_is_not_cancelled(router):
    live, submit = await start(router)
    await router.scheduler.step(finished={submit.first_seq_key: LENGTH})
    async with live:
        assert len([event async for event in live]) == 2
    await settled(router)
    assert router.scheduler.cancels.empty()


async def test_a_deadline_ends_every_output_and_cancels_its_sequence(router):
    deadline = asyncio.get_running_loop().time() + 0.05
    live, submit = await start(router, n=2, deadline=deadline)
    events = [event async for event in live]
    assert [e.finish_reason for e in events[:2]] == [FinishReason.DEADLINE] * 2
    assert isinstance(events[2], Usage)
    first = submit.first_seq_key
    assert await router.scheduler.cancels.get() == [first, first + 1]


async def test_a_deadline_in_the_past_is_refused(router):
    past = asyncio.get_running_loop().time() - 1
    with pytest.raises(DeadlineExceededError):
        await router.inference.generate(GenerateRequest(prompt="a", deadline=past))


async def test_a_live_request_id_is_refused_and_free_again_afterwards(router):
    live, _ = await start(router, request_id="same")
    with pytest.raises(AlreadyExistsError, match="same"):
        await start(router, request_id="same")
    await live.aclose()
    again, _ = await start(router, request_id="same")
    await again.aclose()


async def test_too_many_live_requests_are_refused(router):
    lives = [(await start(router))[0] for _ in range(3)]
    with pytest.raises(TooBusyError, match="3"):
        await router.inference.generate(GenerateRequest(prompt="a"))
    for live in lives:
        await live.aclose()
    (await start(router))[0]._close()


async def test_a_request_that_can_never_be_queued_is_invalid(router):
    router.inference.schedulers._links[0].max_waiting = 2
    with pytest.raises(InvalidArgumentError, match="n is 3; it must be at most 2"):
        await router.inference.generate(GenerateRequest(prompt="a", n=3))
    router.scheduler.load.num_workers = 3
    router.scheduler.load.max_num_seqs = 10
    await router.inference.check_capacity(2, 8)
    assert router.scheduler.num_load_calls
    with pytest.raises(InvalidArgumentError, match="makes 18 sequences, n for each prompt; at m"):
        await router.inference.check_capacity(3, 6)
    with pytest.raises(InvalidArgumentError, match="holds 4 prompts; at most 3 requests may be"):
        await router.inference.check_capacity(4, 1)


async def test_without_a_scheduler_many_requests_are_unavailable_and_not_invalid(router):
    await router.scheduler.stop()
    while router.inference.schedulers.is_ready:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await router.inference.check_capacity(2, 1)


async def test_a_scheduler_reports_how_many_sequences_it_takes(router):
    await router.scheduler.stop()
    scheduler = FakeScheduler(router.scheduler.target.removeprefix("unix:"))
    scheduler.max_waiting = 7
    router.ready.clear()
    await scheduler.start()
    await router.ready.wait()
    assert router.inference.schedulers._links[0].max_waiting == 7
    await scheduler.stop()


async def test_what_the_queues_have_no_room_for_is_refused_before_its_text_is_looked_at(router):
    live, submit = await start(router)
    await router.scheduler.send_room(2)
    # the router has received the room before this
    await router.scheduler.step({submit.first_seq_key: router.tokens("a")})
    await anext(live)
    text = router.inference.text
    prompts, text._prompts = text._prompts, None  # no thread tokenizes
    with pytest.raises(TooBusyError, match="2 more sequences may wait, and this request has 3"):
        await router.inference.generate(GenerateRequest(prompt="a", n=3))
    text._prompts = prompts
    second, again = await start(router, n=2)  # takes all room until the scheduler reports more
    with pytest.raises(TooBusyError, match="0 more sequences may wait"):
        await router.inference.generate(GenerateRequest(prompt="a"))
    with pytest.raises(TooBusyError):
        router.inference.check_room("")
    await router.scheduler.send_room()
    await router.scheduler.step({again.first_seq_key: router.tokens("a")})
    await anext(second)
    third, _ = await start(router)
    for each in (live, second, third):
        await each.aclose()


async def test_a_reconnected_scheduler_starts_with_unknown_room(router):
    live, submit = await start(router)
    await router.scheduler.send_room(0)
    await router.scheduler.step({submit.first_seq_key: router.tokens("a")})
    await anext(live)
    await router.scheduler.stop()
    await router.scheduler.start()
    await router.scheduler.submits.get()
    again, _ = await start(router)
    await again.aclose()
    await live.aclose()


async def test_a_request_that_is_refused_frees_its_place(router):
    for _ in range(10):
        with pytest.raises(InvalidArgumentError):
            await router.inference.generate(
                GenerateRequest(prompt="a", sampling=SamplingParams(max_tokens=MAX_MODEL_LEN))
            )


async def test_draining_refuses_new_requests_and_waits_for_live_ones(router):
    live, submit = await start(router)
    drain = asyncio.create_task(router.cells.drain())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="draining"):
        await router.inference.generate(GenerateRequest(prompt="a"))
    assert not drain.done()
    await router.scheduler.step(finished={submit.first_seq_key: LENGTH})
    assert len([event async for event in live]) == 2
    await drain


class Room:
    """Room that a test opens and closes."""

    def __init__(self):
        self.is_open = asyncio.Event()

    def has_room(self):
        return self.is_open.is_set()

    async def wait_for_room(self):
        await self.is_open.wait()


async def test_a_sink_gets_each_step_at_once_and_merged_steps_after_a_wait_for_room(router):
    live, submit = await start(router)
    key = submit.first_seq_key
    a, b, c = (router.tokens(letter)[0] for letter in "abc")
    events, room = [], Room()
    room.is_open.set()
    sending = asyncio.create_task(live.send_to(events.append, room))
    await router.scheduler.step({key: [a]})
    await settled(router)
    assert [event.text for event in events] == ["a"]
    room.is_open.clear()
    await router.scheduler.step({key: [b]})
    await router.scheduler.step({key: [c]}, finished={key: LENGTH})
    await settled(router)
    assert len(events) == 1
    room.is_open.set()
    await sending
    assert events[1:] == [
        OutputDelta(0, 1, (b, c), "bc"),
        OutputFinished(0, FinishReason.LENGTH),
        Usage(3, 3, 0),
    ]


async def test_a_sink_that_fails_ends_its_own_stream_only(router):
    live, submit = await start(router)
    other, other_submit = await start(router)

    def put(_event):
        raise ConnectionResetError

    sending = asyncio.create_task(live.send_to(put))
    await asyncio.sleep(0)
    token = router.tokens("a")[0]
    await router.scheduler.step(
        {submit.first_seq_key: [token], other_submit.first_seq_key: [token]}
    )
    assert (await anext(other)).text == "a"
    with pytest.raises(ConnectionResetError):
        await sending
    for each in (live, other):
        await each.aclose()


async def test_a_sink_is_told_of_a_refusal_and_of_the_end_by_another_call(router):
    refused, submit = await start(router)
    events = []
    sending = asyncio.create_task(refused.send_to(events.append))
    await router.scheduler.refuse(submit.first_seq_key, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    with pytest.raises(TooBusyError):
        await sending
    taken, _ = await start(router)
    sending = asyncio.create_task(taken.send_to(events.append))
    await asyncio.sleep(0)
    taken.take_away(UnavailableError("the router is shutting down"))
    with pytest.raises(UnavailableError, match="shutting down"):
        await sending
    assert events == []


async def test_tokens_between_two_events_go_out_together_and_the_ends_do_not_wait(router):
    live, submit = await start(router, stream_interval=3)
    key = submit.first_seq_key
    letters = [router.tokens(letter)[0] for letter in "abcdefg"]
    events = []
    sending = asyncio.create_task(live.send_to(events.append))
    for token in letters[:6]:
        await router.scheduler.step({key: [token]})
    await settled(router)
    assert [event.text for event in events] == ["a", "bcd"]
    await router.scheduler.step({key: letters[6:]}, finished={key: LENGTH})
    await sending
    assert [event.text for event in events[2:-2]] == ["efg"]
    assert [event.token_offset for event in events[:-2]] == [0, 1, 4]
    assert events[-2:] == [OutputFinished(0, FinishReason.LENGTH), Usage(3, 7, 0)]


async def test_a_stop_string_does_not_wait_for_more_tokens(router):
    live, submit = await start(router, stream_interval=1024, stop=("c",))
    key = submit.first_seq_key
    await router.scheduler.step({key: [router.tokens(letter)[0] for letter in "abc"]})
    delta, finished, _ = [event async for event in live]
    assert (delta.text, finished.stop_string) == ("ab", "c")


async def test_what_a_step_brings_for_a_request_goes_out_together(router):
    live, submit = await start(router, stop=("abc",))
    key = submit.first_seq_key
    a, b, c = (router.tokens(letter)[0] for letter in "abx")
    events = []
    sending = asyncio.create_task(live.send_to(events.append))
    await asyncio.sleep(0)
    await router.scheduler.step({key: [c, a]})
    await router.scheduler.step({key: [b]}, finished={key: LENGTH})
    await sending
    assert events == [
        OutputDelta(0, 0, (c, a), "x"),
        OutputDelta(0, 2, (b,), "ab"),  # the end releases what may have begun a stop string
        OutputFinished(0, FinishReason.LENGTH),
        Usage(3, 3, 0),
    ]


async def test_the_routers_interval_counts_where_a_request_has_none(router):
    router.inference._stream_interval = 2
    both = [await start(router), await start(router, stream_interval=1)]
    keys = [submit.first_seq_key for _, submit in both]
    texts = [[], []]
    sending = [
        asyncio.create_task(live.send_to(lambda event, i=i: texts[i].append(event.text)))
        for i, (live, _) in enumerate(both)
    ]
    for token in map(router.tokens, "abc"):
        await router.scheduler.step(dict.fromkeys(keys, token))
    await settled(router)
    assert texts == [["a", "bc"], ["a", "b", "c"]]
    for task in sending:
        task.cancel()
    for live, _ in both:
        await live.aclose()

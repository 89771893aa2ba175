"""A scheduler's refusals over gRPC: with the field's name, and the right status."""

from math import inf, nan

import grpc
import pytest
from scheduler_fake_worker import expected_tokens
from scheduler_harness import running_scheduler

from contract.codec.packing import pack_int32
from quire.v1 import common_pb2, scheduler_pb2

pytestmark = pytest.mark.timeout(120)


def submission(**changes):
    fields = {
        "first_seq_key": 1,
        "n": 1,
        "prompt_token_ids": pack_int32([1, 2]),
        "sampling": common_pb2.SamplingParams(seed=1, max_tokens=4),
    }
    return scheduler_pb2.Submit(**(fields | changes))


def sampled(**changes):
    return submission(sampling=common_pb2.SamplingParams(**{"seed": 1, "max_tokens": 4} | changes))


def form(**form):
    return sampled(structured=common_pb2.StructuredOutput(**form))


WRONG = [
    (submission(n=0), "n is 0; it must be in [1, 64]"),
    (submission(n=2**32 - 1), "n is 4294967295; it must be in [1, 64]"),
    (submission(prompt_token_ids=b""), "prompt_token_ids is empty"),
    (submission(prompt_token_ids=b"abc"), "prompt_token_ids has 3 bytes"),
    (
        submission(prompt_token_ids=pack_int32([1, 1000])),
        r"prompt_token_ids[1] is 1000; it must be in [0, 999]",
    ),
    (submission(prompt_token_ids=pack_int32([-5])), "prompt_token_ids[0] is -5"),
    (
        submission(sampling=common_pb2.SamplingParams(max_tokens=4)),
        "sampling.seed is not set",
    ),
    (
        submission(sampling=common_pb2.SamplingParams(seed=1)),
        "sampling.max_tokens is not set; it must be at least 1",
    ),
    (
        submission(sampling=common_pb2.SamplingParams(seed=1, max_tokens=0)),
        "sampling.max_tokens is 0; it must be in [1, ",
    ),
    (
        submission(n=3, outputs=[scheduler_pb2.OutputSoFar()]),
        "outputs has 1 entries; it must have 0 or n = 3",
    ),
    (
        submission(outputs=[scheduler_pb2.OutputSoFar(token_ids=pack_int32([2000]))]),
        "outputs[0].token_ids[0] is 2000",
    ),
    (
        submission(sampling=common_pb2.SamplingParams(seed=1, max_tokens=511)),
        "512",
    ),
    (sampled(max_tokens=-1), "sampling.max_tokens is -1"),
    (sampled(min_tokens=5), "sampling.min_tokens is 5; it must be in [0, 4]"),
    (sampled(logit_bias={1000: 1.0}), "logit_bias has the token id 1000"),
    (sampled(logit_bias={7: nan}), "sampling.logit_bias[7] is nan"),
    (
        sampled(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "sampling.logit_bias has 1025 entries; it must have at most 1024",
    ),
    (
        sampled(stop_token_ids=[3, 1000]),
        "sampling.stop_token_ids[1] is 1000; it must be in [0, 1000)",
    ),
    (sampled(stop_token_ids=range(65)), "sampling.stop_token_ids has 65 entries"),
    (sampled(temperature=-1), "sampling.temperature is -1"),
    (sampled(temperature=inf), "sampling.temperature is inf"),
    (sampled(top_k=1001), "sampling.top_k is 1001; it must be in [0, 1000]"),
    (sampled(top_p=0), "sampling.top_p is 0"),
    (sampled(min_p=nan), "sampling.min_p is nan"),
    (sampled(repetition_penalty=0), "sampling.repetition_penalty is 0"),
    (sampled(presence_penalty=3), "sampling.presence_penalty is 3"),
    (sampled(frequency_penalty=-3), "sampling.frequency_penalty is -3"),
    (sampled(logprobs=21), "sampling.logprobs is 21; it must be in [0, 20]"),
    (sampled(prompt_logprobs=21), "sampling.prompt_logprobs is 21"),
    (form(), "sampling.structured is empty"),
    (form(regex="a"), "sampling.structured.grammar is not set"),
    (form(grammar=" " * (2**19 + 1)), "grammar has 524289 bytes; it must have at most 524288"),
    (submission(request_id="r" * 129), "request_id has 129 characters"),
    (submission(cache_salt="s" * 129), "cache_salt has 129 characters"),
    (submission(cache_salt="\0"), "cache_salt is '\\x00'"),
    (submission(tenant="é" * 65), "tenant has 130 bytes; it must have at most 128"),
    (submission(traceparent="0" * 129), "traceparent has 129 characters"),
    (submission(priority=101), "priority is 101; it must be in [-100, 100]"),
    (submission(deadline_s=nan), "deadline_s is nan"),
    (submission(cache_pin_s=0), "cache_pin_s is 0"),
    (
        submission(beam=common_pb2.BeamSearch(width=2), n=3),
        "n is 3; it must be in [1, 2]",
    ),
]


async def test_wrong_requests_are_refused_by_name_and_the_service_goes_on(folder, worker, connect):
    """As a router of another version, or with a bug, might send them."""
    worker.info.model.structured_output = True
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(5, [1], max_tokens=40)
        for submit, message in WRONG:
            await router.send(submit)
            await router.read_until(lambda: router.refused)
            refused = router.refused.pop(1)
            assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], message
            assert message in refused.message
        worker.resume()
        await router.submit(2, [1], max_tokens=3)
        await router.read_until_finished(2, 5)
        assert router.tokens[5] == expected_tokens([1], 40)
        assert 1 not in router.finished
    assert worker.num_attaches == 1


async def test_a_form_is_refused_by_a_model_that_can_have_none(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.send(form(grammar='start: "a"'))
        await router.read_until(lambda: router.refused)
        assert "this model's outputs cannot be given a form" in router.refused[1].message


async def test_a_request_cannot_be_resumed_under_keys_that_do_not_exist(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(1, [1], max_tokens=40, resume_record=b"")
        first = 2**64 - 63
        await router.resume("request-1", first)
        await router.read_until(lambda: router.refused)
        assert f"first_seq_key is {first}; with n = 64" in router.refused[first].message
        await router.read_until_finished(1)


async def test_key_of_a_live_sequence_is_refused_and_free_again_at_its_end(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2], n=3)
        await router.submit(2, [3, 4])
        await router.read_until(lambda: router.refused)
        assert router.refused[2].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "sequence 2 is live" in router.refused[2].message
        worker.resume()
        await router.read_until_finished(0, 1, 2)
        del router.finished[2], router.tokens[2]
        await router.submit(2, [3, 4])
        await router.read_until_finished(2)
        assert router.tokens[2] == expected_tokens([3, 4], 8)


async def test_full_queue_is_refused_with_a_retry_hint(folder, worker, connect):
    worker.pause()
    async with running_scheduler(folder, [worker.target], max_waiting=3) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [1], max_tokens=100)
        await worker.wait_for_batches(2)
        await router.submit(1, [1], n=3, max_tokens=2)
        await router.submit(10, [1], max_tokens=2)
        await router.read_until(lambda: router.refused)
        refused = router.refused[10]
        assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.retry_after_s > 0
        assert "limit is 3" in refused.message
        worker.resume()
        await router.read_until_finished(0, 1, 2, 3)


async def test_more_sequences_than_may_ever_wait_are_the_clients_fault(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], max_waiting=3) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(10, [1], n=4, max_tokens=2)
        await router.read_until(lambda: router.refused)
        refused = router.refused[10]
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert refused.message == "n is 4; it must be at most 3 (--max-waiting)"


async def test_after_a_refusal_routers_get_the_remaining_room(folder, worker, connect):
    worker.pause()
    async with running_scheduler(folder, [worker.target], max_waiting=4) as scheduler:
        router, other = await connect(scheduler.target), await connect(scheduler.target)

        async def next_room(router):
            while not (step := (await router.read()).step).HasField("room"):
                pass
            return step.room.num_sequences if step.room.HasField("num_sequences") else None

        await router.submit(0, [1], max_tokens=100)
        await worker.wait_for_batches(2)
        await router.submit(1, [1], n=3, max_tokens=2)
        await router.submit(10, [1], n=2, max_tokens=2)
        assert await next_room(router) == 1
        assert 10 in router.refused
        assert await next_room(other) == 1
        await router.submit(20, [1], max_tokens=2)
        while await next_room(other):
            pass  # sent again while there is some room, but little
        worker.resume()
        while await next_room(other) is not None:
            pass
        await router.read_until_finished(0, 1, 2, 3, 20)


async def test_stream_that_does_not_begin_with_hello_is_refused(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        call = router.stub.Connect()
        await call.write(scheduler_pb2.ConnectRequest(submit=submission()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello" in caught.value.details()


async def test_bug_in_reading_ends_the_stream_with_an_error(folder, worker, connect, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        monkeypatch.setattr("scheduler_svc.service.request_from_proto", fail)
        await router.submit(0, [1, 2])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.read_to_end()
        assert caught.value.code() is grpc.StatusCode.INTERNAL

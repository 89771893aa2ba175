"""A scheduler's refusals over gRPC: with the field's name, and the right status."""

import grpc
import pytest
from scheduler_fake_worker import expected_tokens
from scheduler_harness import running_scheduler

from contract.packing import pack_int32
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


@pytest.mark.parametrize(
    ("submit", "message"),
    [
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
            "sampling.max_tokens is 0; it must be at least 1",
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
    ],
)
async def test_wrong_request_is_refused_by_name_and_the_stream_goes_on(
    folder, worker, connect, submit, message
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.send(submit)
        await router.read_until(lambda: router.refused)
        assert router.refused[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert message in router.refused[1].message
        await router.submit(2, [1], max_tokens=3)
        await router.read_until_finished(2)
        assert 1 not in router.finished


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


async def test_after_a_refusal_routers_are_told_how_much_room_there_is(folder, worker, connect):
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
            await router.read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL

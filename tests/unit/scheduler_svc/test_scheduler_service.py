"""The scheduler process with real gRPC, between a fake worker and a fake router."""

import time

import grpc
import pytest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import num_live, running_scheduler

from contract.codec.packing import pack_int32
from quire.v1 import common_pb2, kv_pb2, scheduler_pb2

pytestmark = pytest.mark.timeout(120)


def is_idle(load):
    return (
        load.num_requests_running == load.num_requests_waiting == 0
        and load.num_free_blocks + load.num_cached_blocks == load.num_blocks
    )


async def test_one_request_gets_its_tokens_and_one_end(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(7, [1, 2, 3, 4, 5], max_tokens=10)
        await router.read_until_finished(7)
        assert router.tokens == {7: expected_tokens([1, 2, 3, 4, 5], 10)}
        assert router.finished[7].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert router.admitted[7].queue_s >= 0
        await router.wait_for_load(is_idle)


async def test_welcome_names_epoch_and_the_length_that_the_pool_allows(folder, connect):
    small = await FakeWorker(f"unix:{folder}/w0", num_blocks=16, block_size=4).start()
    async with running_scheduler(folder, [small.target], epoch=77) as scheduler:
        router = await connect(scheduler.target)
        assert router.welcome.epoch == 77
        assert router.welcome.model.id == "fake"
        assert router.welcome.model.max_model_len == 64
    await small.die()


async def test_two_steps_are_in_flight(folder, worker, connect):
    worker.hold_results_for_batches = 5  # result n comes only after batch n + 1
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [1, 2, 3], max_tokens=20)
        await router.read_until_finished(0)
    assert router.tokens[0] == expected_tokens([1, 2, 3], 20)


async def test_never_more_than_two_steps_are_in_flight(folder, worker, connect):
    worker.pause()
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [1, 2, 3], max_tokens=20)
        await worker.wait_for_batches(2)
        await router.load()  # the engine has run since then
        assert len(worker.received) == 2
        worker.resume()
        await router.read_until_finished(0)


async def test_many_sequences_share_one_message_per_step(folder, worker, connect):
    worker.pause()
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        for key in range(50):
            await router.submit(key, [key + 1, 2], max_tokens=12)
        await router.wait_for_live(50)
        worker.resume()
        await router.read_until_finished(*range(50))
    assert router.tokens == {key: expected_tokens([key + 1, 2], 12) for key in range(50)}
    assert len(router.messages) <= len(worker.answered)


async def test_outputs_of_one_request_share_its_prompt(folder, worker, connect):
    prompt = list(range(1, 11))
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(100, prompt, max_tokens=6, n=3)
        await router.read_until_finished(100, 101, 102)
    assert router.tokens == {100 + i: expected_tokens(prompt, 6, i) for i in range(3)}


async def test_stop_token_ends_a_sequence(folder, worker, connect):
    tokens = expected_tokens([5, 6], 10)
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [5, 6], max_tokens=10, stop_token_ids=[tokens[3]])
        await router.read_until_finished(0)
        assert router.finished[0].finish_reason == common_pb2.FINISH_REASON_STOP
        assert router.finished[0].stop_token_id == tokens[3]
        assert router.tokens[0] == tokens[:4]
        await router.wait_for_load(is_idle)


async def test_logprobs_go_to_the_token_they_belong_to(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router, other = await connect(scheduler.target), await connect(scheduler.target)
        await other.submit(0, [9], max_tokens=12)
        for key in range(6):
            logprobs = {"logprobs": 0} if key % 2 else {}
            await router.submit(key, [key + 1], max_tokens=9, **logprobs)
        await router.read_until_finished(*range(6))
        await other.read_until_finished(0)
    assert set(router.logprobs) == {1, 3, 5}
    for key in (1, 3, 5):
        assert router.logprobs[key] == [-token for token in router.tokens[key]]
    assert other.logprobs == {}


async def test_non_finite_logits_end_a_sequence_with_an_error(folder, worker, connect):
    worker.failing_rows = {13}
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [13, 1], max_tokens=5)
        await router.submit(1, [1, 13], max_tokens=5)
        await router.read_until_finished(0, 1)
    assert router.finished[0].finish_reason == common_pb2.FINISH_REASON_ERROR
    assert "finite" in router.finished[0].error.message
    assert router.tokens == {1: expected_tokens([1, 13], 5)}


async def test_two_routers_get_only_events_of_their_own_sequences(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        one, other = await connect(scheduler.target), await connect(scheduler.target)
        for key in range(5):  # the same keys on both streams
            await one.submit(key, [key + 1], max_tokens=7)
            await other.submit(key, [key + 100], max_tokens=9)
        await one.read_until_finished(*range(5))
        await other.read_until_finished(*range(5))
    assert one.tokens == {key: expected_tokens([key + 1], 7) for key in range(5)}
    assert other.tokens == {key: expected_tokens([key + 100], 9) for key in range(5)}


async def test_cancel_frees_the_blocks_within_two_steps(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2, 3], max_tokens=400)
        await worker.run_until_answered(3)
        await router.cancel(0, 12345)
        await router.read_until_finished(0)
        num_received = len(worker.received)
        worker.resume()
        await router.wait_for_load(is_idle)
        assert len(worker.received) - num_received <= 2
        assert router.finished[0].finish_reason == common_pb2.FINISH_REASON_CANCELLED
        assert 12345 not in router.finished


async def test_a_thousand_cancelled_requests_leave_every_block_free_or_cached(
    folder, worker, connect
):
    async with running_scheduler(folder, [worker.target], max_waiting=2000) as scheduler:
        router = await connect(scheduler.target)
        keys = range(0, 4000, 4)
        for key in keys:
            await router.submit(
                key, [key % 1000, 2, 3, 4, 5, key % 7], max_tokens=300, n=1 + key % 3
            )
            if key >= 80:
                await router.cancel(*range(key - 80, key - 76))
        await router.cancel(*range(4000))
        await router.read_until(lambda: all(key in router.finished for key in keys))
        await router.wait_for_load(is_idle)
        assert {end.finish_reason for end in router.finished.values()} == {
            common_pb2.FINISH_REASON_CANCELLED
        }


async def test_router_that_disconnects_leaves_nothing_behind(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], max_waiting=100) as scheduler:
        gone, stays = await connect(scheduler.target), await connect(scheduler.target)
        for key in range(80):  # 64 run, 16 wait
            await gone.submit(key, [key + 1, 5], max_tokens=500)
        await gone.read_until(lambda: len(gone.tokens) >= 10)
        await stays.submit(0, [1, 2, 3], max_tokens=5)
        await gone.disconnect()
        await stays.wait_for_load(is_idle)
        await stays.read_until_finished(0)
        assert stays.tokens[0] == expected_tokens([1, 2, 3], 5)


async def test_router_that_half_closes_is_released(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router, other = await connect(scheduler.target), await connect(scheduler.target)
        await router.submit(0, [1, 2, 3], max_tokens=400)
        await router.call.done_writing()
        while await router.call.read() is not grpc.aio.EOF:
            pass
        assert await router.call.code() is grpc.StatusCode.OK
        await other.wait_for_load(is_idle)


async def test_router_that_does_not_read_loses_its_stream_and_nothing_piles_up(
    folder, worker, connect
):
    async with running_scheduler(folder, [worker.target], max_backlog_mb=1) as scheduler:
        slow, watcher = await connect(scheduler.target), await connect(scheduler.target)
        worker.num_top_logprobs = 2000  # 16 kB per token
        for key in range(16):
            await slow.submit(key, [1, key], max_tokens=200, logprobs=20)
        await watcher.wait_for_load(lambda load: num_live(load) > 0)
        await watcher.wait_for_load(is_idle)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await slow.read_until_finished(*range(16))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "does not read" in caught.value.details()
        await watcher.submit(0, [1, 2], max_tokens=3)
        await watcher.read_until_finished(0)


async def test_slow_router_gets_several_steps_in_one_message(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        for key in range(40):
            await router.submit(key, [key + 1, 2], max_tokens=150, logprobs=20)
        await router.wait_for_load(lambda load: num_live(load) > 0)
        await router.wait_for_load(is_idle)  # everything is computed, and nothing is read
        await router.read_until_finished(*range(40))
    assert len(router.messages) < len(worker.answered)
    for key in range(40):
        assert router.tokens[key] == expected_tokens([key + 1, 2], 150)
        assert router.logprobs[key] == [-token for token in router.tokens[key]]


async def test_request_too_long_for_one_worker_goes_to_another(folder, worker, connect):
    small = await FakeWorker(f"unix:{folder}/w1", num_blocks=10, block_size=4).start()
    small.attach_error = grpc.StatusCode.UNAVAILABLE
    async with running_scheduler(folder, [small.target, worker.target]) as scheduler:
        router = await connect(scheduler.target)
        small.attach_error = None
        await router.wait_for_load(lambda load: load.num_workers == 2)
        worker.pause()
        for key in range(3):  # now it has more sequences than the small one
            await router.submit(key, [key], max_tokens=60)
        await router.submit(3, [7], max_tokens=600)
        await router.read_until(lambda: router.refused)
        assert "together they may be 512" in router.refused[3].message
        worker.resume()
        await router.read_until_finished(0, 1, 2)
        assert not small.received
    await small.die()
    assert router.tokens == {key: expected_tokens([key], 60) for key in range(3)}


async def test_two_workers_share_the_requests(folder, worker, connect):
    second = await FakeWorker(f"unix:{folder}/w1").start()
    async with running_scheduler(folder, [worker.target, second.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        for key in range(20):
            await router.submit(key, [key + 1, 2], max_tokens=30)
        await router.read_until_finished(*range(20))
        assert worker.answered
        assert second.answered
    await second.die()
    assert router.tokens == {key: expected_tokens([key + 1, 2], 30) for key in range(20)}


def make_submit(key, prompt, **fields):
    return scheduler_pb2.Submit(
        first_seq_key=key,
        n=1,
        prompt_token_ids=pack_int32(prompt),
        sampling=common_pb2.SamplingParams(seed=1, max_tokens=8),
        **fields,
    )


async def test_a_request_whose_deadline_has_passed_is_refused(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.send(make_submit(5, [1, 2], deadline_s=0.0))
        await router.read_until(lambda: 5 in router.refused)
        assert router.refused[5].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert "the deadline passed" in router.refused[5].message


async def test_a_waiting_sequence_ends_at_its_deadline(folder, connect):
    small = await FakeWorker(f"unix:{folder}/w0", max_num_seqs=1).start()
    small.pause()
    async with running_scheduler(folder, [small.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [1, 2], max_tokens=40)
        await small.wait_for_batches(1)
        await router.send(make_submit(1, [3, 4], deadline_s=0.5))
        await router.wait_for_load(lambda load: load.num_requests_waiting == 1)
        passed = time.monotonic() + 0.5
        await router.wait_for_load(lambda _: time.monotonic() > passed)
        small.resume()
        await router.read_until_finished(0, 1)
        assert router.finished[1].finish_reason == common_pb2.FINISH_REASON_DEADLINE
        assert (1 in router.admitted, 1 in router.tokens) == (False, False)
    await small.die()


async def test_the_policy_decides_which_sequence_is_next(folder, connect):
    small = await FakeWorker(f"unix:{folder}/w0", max_num_seqs=1).start()
    small.pause()
    async with running_scheduler(folder, [small.target], policy="priority") as scheduler:
        router = await connect(scheduler.target)
        await router.submit(0, [1, 2], max_tokens=3)
        await small.wait_for_batches(1)
        await router.send(make_submit(1, [3, 4], priority=1))
        await router.send(make_submit(2, [5, 6], priority=2))
        await router.wait_for_load(lambda load: load.num_requests_waiting == 2)
        small.resume()
        await router.read_until_finished(0, 1, 2)
        assert list(router.admitted) == [0, 2, 1]
    await small.die()


async def describe_kv(router, **query):
    request = scheduler_pb2.DescribeSchedulerKvRequest(query=kv_pb2.KvQuery(**query))
    return (await router.stub.DescribeSchedulerKv(request)).workers


async def test_kv_is_described_worker_by_worker(folder, worker, connect):
    async with running_scheduler(folder, [worker.target, f"unix:{folder}/gone"]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(7, [1, 2, 3, 4, 5], n=2)
        await worker.wait_for_batches(1)
        (described,) = await describe_kv(router, block_tables=True)
        assert described.worker == worker.target
        assert [seq.request_id for seq in described.sequences] == ["request-7"] * 2
        (tier,) = described.tiers
        assert tier.tier == kv_pb2.KV_TIER_DEVICE
        assert len(tier.states) == tier.num_blocks == 256
        assert tier.num_held + tier.num_shared >= 2
        worker.resume()


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ({"worker": "nowhere"}, "NOT_FOUND", "'nowhere' is not one of this scheduler's"),
        ({"worker": "gone"}, "UNAVAILABLE", "is not attached"),
        ({"max_sequences": 1025}, "INVALID_ARGUMENT", "query.max_sequences is 1025"),
        ({"max_blocks": 65_537}, "INVALID_ARGUMENT", "query.max_blocks is 65537"),
    ],
)
async def test_kv_query_that_cannot_be_answered_is_refused(
    folder, worker, connect, query, code, words
):
    gone = f"unix:{folder}/gone"
    query = {**query, "worker": gone} if query.get("worker") == "gone" else query
    async with running_scheduler(folder, [worker.target, gone]) as scheduler:
        router = await connect(scheduler.target)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await describe_kv(router, **query)
        assert refused.value.code().name == code
        assert words in refused.value.details()


async def test_request_cannot_move_where_there_is_no_host_memory(folder, worker, connect):
    other = await FakeWorker(f"unix:{folder}/w2").start()
    async with running_scheduler(folder, [worker.target, other.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        for each in (worker, other):
            each.pause()
        await router.submit(7, [1, 2, 3])
        await router.wait_for_load(lambda load: load.num_requests_running == 1)
        workers = await describe_kv(router)
        target = next(each.worker for each in workers if not each.sequences)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stub.Migrate(
                scheduler_pb2.MigrateRequest(request_id="request-7", worker=target)
            )
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "no host tier" in refused.value.details()
        for each in (worker, other):
            each.resume()
        await router.read_until_finished(7)
        assert router.tokens[7] == expected_tokens([1, 2, 3], 8)
    await other.die()

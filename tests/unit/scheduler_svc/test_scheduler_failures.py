"""The sequences of a lost worker, connection or scheduler."""

import asyncio
import sys

import grpc
import pytest
from scheduler_fake_worker import FakeWorker, expected_tokens
from scheduler_harness import get, running_scheduler, wait_until_not_ready

from contract.codec.packing import pack_int32
from contract.errors import StaleEpochError
from quire.v1 import common_pb2, scheduler_pb2

pytestmark = pytest.mark.timeout(120)


async def test_sequences_go_on_when_their_worker_returns(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        worker.pause()
        router = await connect(scheduler.target)
        for key in range(30):
            await router.submit(key, [key + 1, 2, 3], max_tokens=60)
        await router.submit(100, [1, 2, 3, 4, 5, 6], max_tokens=40, n=3)
        await router.wait_for_live(33)
        for num_answered in (6, 7, 20):
            await worker.run_until_answered(num_answered)
            await worker.die()
            await wait_until_not_ready(scheduler)
            await worker.start()
        worker.resume()
        await router.read_until_finished(*range(30), 100, 101, 102)
        await router.wait_for_load(lambda load: load.num_requests_running == 0)
    for key in range(30):
        assert router.tokens[key] == expected_tokens([key + 1, 2, 3], 60)
    for index in range(3):
        assert router.tokens[100 + index] == expected_tokens([1, 2, 3, 4, 5, 6], 40, index)
    assert worker.num_attaches == 4
    assert worker.received == sorted(set(worker.received)), "step ids grow within an epoch"


async def test_sequences_run_on_when_a_connection_is_cut(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        worker.pause()
        router = await connect(scheduler.target)
        for key in range(5):
            await router.submit(key, [key + 1, 2, 3], max_tokens=30)
        await router.wait_for_live(5)
        for num_answered in (6, 9):
            await worker.run_until_answered(num_answered)
            await worker.cut_connections()
        worker.resume()
        await router.read_until_finished(*range(5))
        load = await router.wait_for_load(lambda load: load.num_requests_running == 0)
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks
    for key in range(5):
        assert router.tokens[key] == expected_tokens([key + 1, 2, 3], 30)
    *_, first, second = (worker.num_computed_before[index : index + 5] for index in (0, 5, 10))
    assert min(first) > 0
    assert min(second) > max(first)


async def test_each_sequence_runs_on_at_the_worker_that_has_it(folder, worker, connect):
    second = await FakeWorker(f"unix:{folder}/w1").start()
    targets = [worker.target, second.target]
    prompts = {key: [key + 1, 2, 3] for key in range(6)}
    async with running_scheduler(folder, targets, placement="round-robin") as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        for key, prompt in prompts.items():
            await router.submit(key, prompt, max_tokens=300)
        await router.read_until(lambda: len(router.tokens) == 6)
    before = dict(router.tokens)
    assert min(map(len, before.values())) > 0
    async with running_scheduler(folder, targets[::-1], placement="round-robin") as scheduler:
        router = await connect(scheduler.target)
        for key, prompt in prompts.items():
            so_far = scheduler_pb2.OutputSoFar(token_ids=pack_int32(before[key]))
            await router.submit(key, prompt, max_tokens=300, outputs=[so_far])
        await router.read_until_finished(*prompts)
    await second.die()
    for each in (worker, second):
        assert min(each.num_computed_before[3:]) > 0, "it was computed before, and here"
    for key, prompt in prompts.items():
        assert before[key] + router.tokens[key] == expected_tokens(prompt, 300)


async def test_sequences_move_to_the_worker_that_is_left(folder, worker, connect):
    other = await FakeWorker(f"unix:{folder}/w1").start()
    async with running_scheduler(folder, [worker.target, other.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        worker.pause()
        other.pause()
        for key in range(20):
            await router.submit(key, [key + 1, 2], max_tokens=50)
        await worker.wait_for_batches(2)
        await other.wait_for_batches(2)
        other.resume()
        await router.read_until(lambda: router.tokens)
        await worker.die()
        await router.read_until_finished(*range(20))
        assert (await get(scheduler, "/ready"))[0] == 200
    await other.die()
    assert router.tokens == {key: expected_tokens([key + 1, 2], 50) for key in range(20)}


async def test_sequences_are_cancelled_while_no_worker_has_them(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router, gone = await connect(scheduler.target), await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=200, n=2)
        await router.submit(5, [1, 2], max_tokens=200)
        await gone.submit(0, [7], max_tokens=400)
        await router.wait_for_live(4)
        await worker.run_until_answered(5)
        await worker.die()
        await wait_until_not_ready(scheduler)
        await router.cancel(1, 5, 99)
        await router.read_until_finished(1, 5)
        assert router.finished[1].finish_reason == common_pb2.FINISH_REASON_CANCELLED
        await gone.disconnect()
        await router.wait_for_load(lambda load: load.num_requests_waiting == 1)
        await worker.start()
        worker.resume()
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1, 2], 200)
        assert set(router.finished) == {0, 1, 5}


async def test_requests_that_come_while_no_worker_is_attached_are_held(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], max_waiting=3) as scheduler:
        router = await connect(scheduler.target)
        await worker.die()
        await wait_until_not_ready(scheduler)
        await router.submit(0, [1, 2], n=2)
        await router.submit(10, [3, 4], n=2)
        await router.read_until(lambda: router.refused)
        assert router.refused[10].code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        await router.submit(20, [5, 6])
        await worker.start()
        await router.read_until_finished(0, 1, 20)
        assert router.tokens[20] == expected_tokens([5, 6], 8)


async def test_lost_workers_request_that_fits_no_other_worker_ends_with_an_error(
    folder, worker, connect
):
    small = await FakeWorker(f"unix:{folder}/w1", num_blocks=10, block_size=4).start()
    small.attach_error = grpc.StatusCode.UNAVAILABLE
    async with running_scheduler(folder, [worker.target, small.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=200)
        await worker.wait_for_batches(2)
        small.attach_error = None
        await router.wait_for_load(lambda load: load.num_workers == 2)
        await worker.die()
        await router.read_until_finished(0)
        assert router.finished[0].finish_reason == common_pb2.FINISH_REASON_ERROR
        assert "40" in router.finished[0].error.message
    await small.die()


async def test_request_that_takes_its_workers_down_ends_and_spares_its_neighbours(
    folder, worker, connect
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        for key in range(5):
            await router.submit(key, [key + 1, 2], max_tokens=100)
        await router.wait_for_live(5)
        await worker.run_until_answered(5)
        worker.poison = 666
        await router.submit(9, [666, 1], max_tokens=10, n=2)
        worker.resume()
        await router.read_until_finished(*range(5), 9, 10)
        await router.wait_for_live(0)
    for key in (9, 10):
        assert router.finished[key].finish_reason == common_pb2.FINISH_REASON_ERROR
        assert "lost 3 times in a row" in router.finished[key].error.message
    assert router.tokens == {key: expected_tokens([key + 1, 2], 100) for key in range(5)}
    assert worker.num_attaches == 4


async def test_requests_that_wait_are_not_blamed_for_a_lost_worker(folder, connect):
    worker = await FakeWorker(f"unix:{folder}/w0", max_num_seqs=1).start()
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.poison = 666
        worker.pause()
        await router.submit(0, [666, 1], max_tokens=10)
        for key in range(1, 4):
            await router.submit(key, [key, 2], max_tokens=10)
        await router.wait_for_live(4)
        worker.resume()
        await router.read_until_finished(*range(4))
    await worker.die()
    assert router.finished[0].finish_reason == common_pb2.FINISH_REASON_ERROR
    assert router.tokens == {key: expected_tokens([key, 2], 10) for key in range(1, 4)}


async def test_request_that_gains_tokens_survives_any_number_of_losses(folder, worker, connect):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        worker.pause()
        router = await connect(scheduler.target)
        await router.submit(0, [1, 2], max_tokens=60)
        for num_answered in range(3, 24, 3):
            await worker.run_until_answered(num_answered)
            await worker.die()
            await wait_until_not_ready(scheduler)
            await worker.start()
        worker.resume()
        await router.read_until_finished(0)
    assert router.tokens[0] == expected_tokens([1, 2], 60)


def name_another_step(result):
    result.step_id += 1


def name_another_epoch(result):
    result.epoch += 1


def drop_a_token(result):
    result.sampled_token_ids = b""


def name_a_row_out_of_range(result):
    result.sampled_rows = pack_int32([10_000])


@pytest.mark.parametrize(
    "lie", [name_another_step, name_another_epoch, drop_a_token, name_a_row_out_of_range]
)
async def test_worker_that_answers_wrongly_is_attached_again(folder, worker, connect, lie):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        router = await connect(scheduler.target)
        worker.pause()
        await router.submit(0, [1, 2], max_tokens=100)
        await worker.run_until_answered(4)
        worker.wrong_results = lie
        worker.resume()
        await wait_until_not_ready(scheduler)
        worker.wrong_results = None
        await router.read_until_finished(0)
        assert router.tokens[0] == expected_tokens([1, 2], 100)
    assert worker.num_attaches > 1


async def test_worker_with_another_model_is_not_used(folder, worker, connect):
    stranger = await FakeWorker(f"unix:{folder}/w1", model_id="stranger").start()
    stranger.attach_error = grpc.StatusCode.UNAVAILABLE
    async with running_scheduler(folder, [worker.target, stranger.target]) as scheduler:
        router = await connect(scheduler.target)
        stranger.attach_error = None
        num_attaches = stranger.num_attaches
        while stranger.num_attaches < num_attaches + 2:
            assert (await router.load()).num_workers == 1
        await worker.die()
        while "stranger" not in (await wait_until_not_ready(scheduler))[1]["status"]:
            pass
    await stranger.die()


async def test_scheduler_waits_for_a_worker_and_says_so(folder, worker, connect):
    worker.attach_error = grpc.StatusCode.UNAVAILABLE
    async with running_scheduler(folder, [worker.target]) as scheduler:
        while "told to refuse" not in (answer := await get(scheduler, "/ready"))[1]["status"]:
            assert answer[0] == 503
        connecting = asyncio.create_task(connect(scheduler.target))
        worker.attach_error = None
        router = await connecting
        assert (await get(scheduler, "/ready")) == (200, {"status": "ready"})
        assert router.welcome.model.vocab_size == 1000


async def test_older_scheduler_gives_up_when_a_newer_one_attaches(folder, worker, connect):
    async with running_scheduler(folder, [worker.target], socket="new", epoch=2) as newer:
        await connect(newer.target)
        with pytest.raises(StaleEpochError):
            async with running_scheduler(folder, [worker.target], socket="old", epoch=1) as older:
                await older.task


async def test_running_scheduler_gives_up_when_its_batches_are_stale(folder, worker, connect):
    with pytest.raises(StaleEpochError):  # noqa: PT012 - from the task, at the end of the block
        async with running_scheduler(folder, [worker.target], epoch=1) as scheduler:
            router = await connect(scheduler.target)
            worker.epoch, worker.tells_epoch = 2, False
            await router.submit(0, [1, 2])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.read_to_end()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await scheduler.task


async def test_idle_scheduler_gives_up_when_a_newer_one_attached_before_its_stream_was_opened(
    folder, worker, connect
):
    """Without a batch, the worker does not know the scheduler behind a stream."""
    with pytest.raises(StaleEpochError):  # noqa: PT012 - from the task, at the end of the block
        async with running_scheduler(folder, [worker.target], epoch=1) as scheduler:
            await connect(scheduler.target)
            worker.epoch = 2
            await scheduler.task


async def start_process(folder, worker, *arguments):
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_svc", "--workers", worker.target),
        *("--uds", str(folder / "s"), "--http-port", "0", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )


async def test_process_hands_over_what_lives_when_it_is_terminated(folder, worker, connect):
    process = await start_process(folder, worker)
    while b"worker attached" not in await process.stderr.readline():
        pass
    router = await connect(f"unix:{folder}/s")
    worker.pause()
    await router.submit(0, [1, 2], max_tokens=50)
    await worker.wait_for_batches(2)
    process.terminate()
    while b"draining" not in await process.stderr.readline():
        pass
    worker.resume()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.read_until_finished(0)
    assert caught.value.details() == "the scheduler is shutting down"
    assert router.tokens[0] == expected_tokens([1, 2], 2)
    await process.communicate()
    assert process.returncode == 0


async def test_process_with_a_stale_epoch_exits_with_its_own_code(folder, worker):
    worker.epoch = 2**63
    process = await start_process(folder, worker, "--epoch", "5")
    _, errors = await process.communicate()
    assert process.returncode == 3
    assert b"a newer scheduler has taken over" in errors

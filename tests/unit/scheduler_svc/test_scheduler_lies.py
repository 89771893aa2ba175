"""A worker that sends wrong results loses its link; the log has the reason."""

import re

import numpy as np
import pytest
from scheduler_fake_worker import VOCAB_SIZE, FakeWorker, expected_tokens
from scheduler_harness import get, running_scheduler, wait_until_not_ready

from contract.codec.packing import pack_int32, unpack_int32
from quire.v1 import common_pb2, worker_pb2

pytestmark = pytest.mark.timeout(120)


def ints(*values):
    return pack_int32(np.array(values, np.int32))


def sampled(result):
    return unpack_int32(result.sampled_rows, "").tolist()


def twice(result):
    result.sampled_rows += result.sampled_rows[:4]
    result.sampled_token_ids += result.sampled_token_ids[:4]


def row_of_nobody(result):
    result.sampled_rows += ints(60)
    result.sampled_token_ids += ints(1)


def row_out_of_range(result):
    result.sampled_rows += ints(64)
    result.sampled_token_ids += ints(1)


def negative_row(result):
    result.stopped_rows = ints(-1)


def nothing_sampled(result):
    result.ClearField("sampled_rows")
    result.ClearField("sampled_token_ids")
    result.ClearField("stopped_rows")


def token_out_of_range(result):
    result.sampled_token_ids = ints(VOCAB_SIZE) + result.sampled_token_ids[4:]


def negative_token(result):
    result.sampled_token_ids = ints(-1) + result.sampled_token_ids[4:]


def stop_of_nobody(result):
    result.stopped_rows = ints(60)


def stop_twice(result):
    result.stopped_rows = ints(sampled(result)[0], sampled(result)[0])


def failed_and_sampled(result):
    result.failed_rows = ints(sampled(result)[0])


def swap_in_never_asked_for(result):
    result.failed_swap_in_block_ids = ints(3)


def store_never_asked_for(result):
    result.stored_disk_block_ids = ints(3)


def load_never_asked_for(result):
    result.loaded_host_block_ids = ints(2**30)


def step_never_sent(result):
    result.step_id += 7


def other_epoch(result):
    result.epoch += 1


def logprob_of_nobody(result):
    result.logprobs.add(index=2**31)


def lopsided_logprob(result):
    result.logprobs.add(index=0, logprob=common_pb2.TokenLogprob(top_token_ids=[1]))


def likely_token_out_of_range(result):
    logprob = common_pb2.TokenLogprob(top_token_ids=[VOCAB_SIZE], top_logprobs=[-1.0])
    result.logprobs.add(index=0, logprob=logprob)


def score_of_nobody(result):
    result.prompt_logprobs.add(row=2**31, position=1)


def torn_array(result):
    result.sampled_rows += b"\0"


def endless_step(result):
    result.execute_s = float("inf")


LIES = {
    twice: "sampled_rows .* 2 times; it must be 1",
    row_of_nobody: "sampled_rows .* row 60 1 times; it must be 0",
    row_out_of_range: r"sampled_rows\[\d+\] is 64; it must be in \[0, 63\]",
    negative_row: r"stopped_rows\[0\] is -1",
    nothing_sampled: "sampled_rows .* 0 times; it must be 1",
    token_out_of_range: rf"sampled_token_ids\[0\] is {VOCAB_SIZE}",
    negative_token: r"sampled_token_ids\[0\] is -1",
    stop_of_nobody: "stopped_rows has a row twice",
    stop_twice: "stopped_rows has a row twice",
    failed_and_sampled: "sampled_rows .* 2 times; it must be 1",
    swap_in_never_asked_for: "failed_swap_in_block_ids has block 3; no such move",
    store_never_asked_for: "stored_disk_block_ids has block 3; no such move",
    load_never_asked_for: f"loaded_host_block_ids has block {2**30}; no such move",
    step_never_sent: "step_id is",
    other_epoch: "epoch is",
    logprob_of_nobody: f"logprobs.index is {2**31}",
    lopsided_logprob: "logprobs.top_logprobs has 0 entries; it must have 1",
    likely_token_out_of_range: f"logprobs.top_token_ids has {VOCAB_SIZE}",
    score_of_nobody: f"prompt_logprobs.row is {2**31}",
    torn_array: "sampled_rows",
    endless_step: "execute_s is inf",
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_worker_with_wrong_results_loses_its_link_and_its_sequences_continue(
    folder, worker, connect, capsys, lie
):
    async with running_scheduler(folder, [worker.target]) as scheduler:
        worker.pause()
        router = await connect(scheduler.target)
        for key in range(8):
            await router.submit(key, [key + 1, 2, 3], max_tokens=30)
        await router.wait_for_live(8)
        await worker.run_until_answered(4)

        def lie_once(result):
            if sampled(result):
                worker.wrong_results = None
                lie(result)

        worker.wrong_results = lie_once
        worker.resume()
        await router.read_until_finished(*range(8))
        await router.wait_for_load(lambda load: load.num_requests_running == 0)
    assert router.tokens == {key: expected_tokens([key + 1, 2, 3], 30) for key in range(8)}
    assert worker.num_attaches == 2
    # the log
    assert re.search(f"it sent a wrong result: {LIES[lie]}", capsys.readouterr().out)


async def test_requests_of_a_worker_with_wrong_results_are_served_by_the_other(
    folder, worker, connect
):
    honest = await FakeWorker(f"unix:{folder}/w1").start()
    worker.wrong_results = lambda result: sampled(result) and twice(result)
    async with running_scheduler(folder, [worker.target, honest.target]) as scheduler:
        router = await connect(scheduler.target)
        await router.wait_for_load(lambda load: load.num_workers == 2)
        for key in range(20):
            await router.submit(key, [key + 1, 2], max_tokens=20)
        await router.read_until(lambda: len(router.finished) == 20)
        assert (await get(scheduler, "/ready"))[0] == 200
    await honest.die()
    served = [key for key, end in router.finished.items() if not end.HasField("error")]
    assert served
    for key in served:
        assert router.tokens[key] == expected_tokens([key + 1, 2], 20)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_blocks", 2**32 - 1, "num_blocks is 4294967295; it must be in"),
        ("num_host_blocks", 2**25, "num_host_blocks is 33554432; it must be in"),
        ("num_disk_blocks", 2**32 - 1, "num_disk_blocks is 4294967295; it must be in"),
        ("max_num_seqs", 2**20, "max_num_seqs is 1048576; it must be in"),
        ("max_num_seqs", 0, "max_num_seqs is 0; it must be in"),
        ("block_size", 2**20, "block_size is 1048576; it must be in"),
        ("model", {"vocab_size": 0}, "vocab_size is 0; it must be in"),
        ("model", {"adapters": [{"name": "a", "digest": b"short"}]}, "a digest of 5 bytes"),
        ("model", {"eos_token_ids": [VOCAB_SIZE]}, f"eos_token_ids has {VOCAB_SIZE}"),
    ],
)
async def test_worker_of_absurd_size_is_not_attached(folder, worker, capsys, field, value, problem):
    if isinstance(value, dict):
        model = worker_pb2.WorkerInfo(model=value).model
        if "vocab_size" in value:
            worker.info.model.vocab_size = 0
        worker.info.model.MergeFrom(model)
    else:
        setattr(worker.info, field, value)
    async with running_scheduler(folder, [worker.target]) as scheduler:
        reason = ""
        while "its description is invalid" not in reason:
            _, body = await wait_until_not_ready(scheduler)
            reason = str(body)
    assert problem in capsys.readouterr().out


async def test_many_long_rows_are_not_more_than_a_scheduler_can_hold(folder, worker, capsys):
    worker.info.max_num_seqs = 2**16
    worker.info.max_num_batched_tokens = 2**16
    worker.info.num_blocks = 2**24
    worker.info.model.max_model_len = 2**24
    async with running_scheduler(folder, [worker.target]) as scheduler:
        while "its description is invalid" not in str((await wait_until_not_ready(scheduler))[1]):
            pass
    assert "the product must be at most" in capsys.readouterr().out

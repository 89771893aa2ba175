"""Calls of the contract tests to a worker, and readers of its results."""

import grpc
import grpc.aio
import pytest

from contract.codec.packing import pack_int32, unpack_int32
from contract.worker_limits import Limits
from quire.v1 import common_pb2, worker_pb2

VOCAB_SIZE = 97
LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=VOCAB_SIZE,
    num_host_blocks=6,
    num_disk_blocks=5,
)
MAX_BLOCKS = 20
PROMPT = [5, 6, 7]
TWO_BLOCKS = [5, 6, 7, 8, 9, 10]
"""A prompt with a full block and a partial one."""


async def attach(worker, epoch=1):
    return await worker.Attach(worker_pb2.AttachRequest(epoch=epoch))


async def resize(worker, num_blocks, epoch=1):
    request = worker_pb2.ResizePoolRequest(epoch=epoch, num_blocks=num_blocks)
    return await worker.ResizePool(request)


async def held(worker, epoch):
    """All parts of the worker's holdings, merged."""
    whole = worker_pb2.ReadHoldingsResponse()
    async for part in worker.ReadHoldings(worker_pb2.ReadHoldingsRequest(epoch=epoch)):
        whole.MergeFrom(part)
    return whole


def batch(step_id, num_decodes=0, *, epoch=1, new=(), **arrays):
    return worker_pb2.StepBatch(
        epoch=epoch,
        step_id=step_id,
        num_decodes=num_decodes,
        new_sequences=new,
        **{name: pack_int32(values) for name, values in arrays.items()},
    )


def with_moves(message, **moves):
    """Add moves of KV to a batch: `swap_out=([1], [2])` copies device block 1 to host block 2."""
    for kind, (src, dst) in moves.items():
        setattr(message.kv_commands, f"{kind}_src_block_ids", pack_int32(src))
        setattr(message.kv_commands, f"{kind}_dst_block_ids", pack_int32(dst))
    return message


def sequence(row=0, tokens=PROMPT, blocks=(0,), computed=0, total=12, index=0, **sampling):
    return worker_pb2.NewSequence(
        seq_id=1 + row,
        row=row,
        token_ids=pack_int32(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        block_ids=pack_int32(blocks),
        sampling=common_pb2.SamplingParams(**{"seed": 1, "temperature": 0, **sampling}),
        max_total_tokens=total,
        output_index=index,
    )


def first_batch(step_id=1, *, epoch=1, **changes):
    return batch(
        step_id, epoch=epoch, new=[sequence(**changes)], chunk_rows=[0], chunk_lens=[len(PROMPT)]
    )


async def ask(call, message):
    """Send a batch and return its result."""
    await call.write(message)
    return await call.read()


async def ask_until_ended(call, message, num_moves):
    """Send a batch that computes nothing and, while its disk moves continue, empty ones.

    Returns all ended moves, and the next step. An empty step waits for a move, so each result has
    one.
    """
    ends, step_id = [[], [], [], []], message.step_id
    while True:
        news = disk_ends(await ask(call, message))
        assert any(news)
        ends = [sorted(known + new) for known, new in zip(ends, news, strict=True)]
        step_id += 1
        if sum(map(len, ends)) == num_moves:
            return ends, step_id
        message = batch(step_id)


async def run_alone(worker, epoch, num_steps=8, **changes):
    """Return the tokens of one sequence that runs alone and gets blocks as it grows."""
    await attach(worker, epoch)
    call = worker.Execute()
    tokens = list(sampled(await ask(call, first_batch(epoch=epoch, **changes))).values())
    for step_id in range(2, num_steps + 1):
        position = len(PROMPT) + step_id - 2
        grown = {}
        if position % LIMITS.block_size == 0:
            grown = {
                "appended_rows": [0],
                "appended_block_ids": [position // LIMITS.block_size],
            }
        result = await ask(call, batch(step_id, 1, epoch=epoch, **grown))
        tokens += sampled(result).values()
    call.cancel()
    return tokens


def sampled(result):
    """The sampled token of each row."""
    rows = unpack_int32(result.sampled_rows, "sampled_rows").tolist()
    tokens = unpack_int32(result.sampled_token_ids, "sampled_token_ids").tolist()
    return dict(zip(rows, tokens, strict=True))


def stopped(result):
    return unpack_int32(result.stopped_rows, "stopped_rows").tolist()


def disk_ends(result):
    """A result's ended disk moves: stored, failed stores, loaded, failed loads."""
    fields = (
        "stored_disk_block_ids",
        "failed_disk_block_ids",
        "loaded_host_block_ids",
        "failed_host_block_ids",
    )
    return [unpack_int32(getattr(result, field), field).tolist() for field in fields]


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()

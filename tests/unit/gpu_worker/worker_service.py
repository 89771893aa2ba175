"""A worker's gRPC service with a fake model, and batches as a scheduler sends them."""

import asyncio

from fake_model import VOCAB_SIZE

from contract.codec.packing import pack_int32
from contract.info import WorkerInfo
from contract.worker_limits import Limits
from quire.v1 import common_pb2, worker_pb2

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
INFO = WorkerInfo("w0", "cpu", "fake", LIMITS, (96,), 64, "float32")
PROMPT = [5, 6, 7]


class Worker:
    """A worker behind a real socket, and a client of it."""

    def __init__(self, service, step_loop, stub):
        self.service = service
        self.step_loop = step_loop
        self.stub = stub

    async def attach(self, epoch):
        return await self.stub.Attach(worker_pb2.AttachRequest(epoch=epoch))


def batch(epoch, step_id, num_decodes=0, **parts):
    packed = {
        name: pack_int32(value) if name != "new_sequences" else value
        for name, value in parts.items()
    }
    return worker_pb2.StepBatch(epoch=epoch, step_id=step_id, num_decodes=num_decodes, **packed)


def new_sequence(row=0, tokens=PROMPT, blocks=(0, 1, 2), **changes):
    values = {
        "seq_id": 1,
        "row": row,
        "token_ids": pack_int32(tokens),
        "num_prompt_tokens": len(tokens),
        "block_ids": pack_int32(blocks),
        "sampling": common_pb2.SamplingParams(seed=1, temperature=0),
        "max_total_tokens": 12,
    }
    return worker_pb2.NewSequence(**(values | changes))


def first_batch(epoch=1, step_id=1, **changes):
    return batch(
        epoch,
        step_id,
        new_sequences=[new_sequence(**changes)],
        chunk_rows=[0],
        chunk_lens=[len(PROMPT)],
    )


async def until_open(service):
    """Wait until the handler of a stream runs, which its client cannot see."""
    async with asyncio.timeout(10):
        while not service._executions:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)

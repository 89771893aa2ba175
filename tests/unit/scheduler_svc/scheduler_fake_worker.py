"""A worker without a model, which checks that its scheduler keeps the contract."""

import asyncio
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np

from contract.arrays import ints
from contract.codec.info import worker_info_from_proto
from contract.codec.packing import pack_int32
from contract.codec.sampling import sampling_from_proto
from contract.codec.step import plan_from_proto, result_to_proto
from contract.lora import LoraAdapter
from contract.step import Result, StepLogprob
from quire.v1 import (
    adapters_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    loading_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from rpc.transport import DEFAULT_MAX_MESSAGE_MB, channel_options
from tests.unit.scheduler_svc.scheduler_fake_adapters import FakeAdapters
from tests.unit.scheduler_svc.scheduler_fake_loading import FakeLoading

VOCAB_SIZE = 1000


def read_tokens(state, token_ids):
    """Advance the state of the fake model, which depends on every token so far."""
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state


def expected_tokens(prompt, num_tokens, output_index=0):
    """The expected output of a sequence."""
    state, token_ids = read_tokens(17 + output_index, prompt), []
    for _ in range(num_tokens):
        token_ids.append(state % VOCAB_SIZE)
        state = read_tokens(state, token_ids[-1:])
    return token_ids


@dataclass
class Row:
    token_ids: list
    num_computed: int
    blocks: list
    max_total: int
    model_state: int
    stop_token_ids: frozenset
    with_logprobs: bool
    identity: bytes
    started: bool = False  # has computed all its known tokens
    stopped: bool = False


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Serves at `target`. While paused, it takes batches and sends no results."""

    def __init__(
        self,
        target,
        *,
        num_blocks=256,
        block_size=4,
        max_num_seqs=64,
        model_id="fake",
        max_num_blocks=None,
        block_bytes=0,
    ):
        self.target = target
        self.num_drains = 0
        self.info = worker_pb2.WorkerInfo(
            worker_id="w",
            device="none",
            model=common_pb2.ModelInfo(
                id=model_id, max_model_len=512, vocab_size=VOCAB_SIZE, eos_token_ids=[0]
            ),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(256, max_num_seqs),
            num_blocks=num_blocks,
            max_num_blocks=max_num_blocks,
            min_num_blocks=1 if max_num_blocks is None else num_blocks,
            block_size=block_size,
            block_bytes=block_bytes,
            instance_id=1,
            takes_kv=True,
            can_unload=True,
        )
        self.tells_epoch = True
        """Whether its state says which epoch it obeys."""
        self.memory_level = common_pb2.MEMORY_LEVEL_UNSPECIFIED
        self.epoch = 0
        self.held_rows = ()  # when it was attached
        self.num_computed_before = []  # for each announced sequence
        self.announced_at = {}  # step ids, by the first token of a prompt
        self.attach_error = None
        self.resize_error = None
        self.may_resize = asyncio.Event()
        self.may_resize.set()
        self.was_asked_to_resize = asyncio.Event()
        self.num_attaches = 0
        self.rows = {}
        self.received = []  # step ids of batches, in order
        self.answered = []  # step ids of results, in order
        self.received_one = asyncio.Condition()
        self.running = asyncio.Event()
        self.running.set()
        self.lives = asyncio.Event()
        self.lives.set()
        self.pause_at = None  # pause after this many results
        self.has_paused = asyncio.Event()
        self.hold_results_for_batches = 0
        self.is_leaving = asyncio.Event()
        self.was_left = asyncio.Event()  # set when a stream has ended
        self.wrong_results = None
        self.failing_rows = frozenset()
        self.poison = None  # a first token of a prompt: a step with such a sequence raises
        self.num_top_logprobs = 20
        self.execute_s = 0.0  # the duration of a step; it reports a thousandth more
        self.adapters = FakeAdapters(self)
        self.loading = FakeLoading(self)
        self.executing = set()  # queues of the open streams
        self._server = None

    async def start(self):
        self._server = grpc.aio.server(options=channel_options(DEFAULT_MAX_MESSAGE_MB))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self.adapters, self._server)
        loading_pb2_grpc.add_LoadingServiceServicer_to_server(self.loading, self._server)
        self._server.add_insecure_port(self.target)
        await self._server.start()
        return self

    async def Drain(self, request, context):  # noqa: ARG002, N802
        self.num_drains += 1
        yield admin_pb2.DrainResponse(num_live=3)
        yield admin_pb2.DrainResponse(num_live=0)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "as if the process had ended")

    async def die(self):
        await self._server.stop(None)
        self.rows = {}

    async def cut_connections(self):
        await self._server.stop(None)
        await self.start()

    def pause(self):
        self.running.clear()

    def resume(self):
        self.running.set()

    async def run_until_answered(self, num_answered):
        """Run until `num_answered` results were sent in all, and then pause."""
        self.pause_at = num_answered
        self.has_paused.clear()
        self.resume()
        await self.has_paused.wait()

    async def Attach(self, request, context):  # noqa: N802
        self.num_attaches += 1
        if self.attach_error is not None:
            await context.abort(self.attach_error, "told to refuse")
        if request.epoch < self.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a newer scheduler is here")
        self.epoch = request.epoch
        self.held_rows, self.rows = tuple(self.rows.values()), {}
        return worker_pb2.AttachResponse(worker=self.info, is_unloaded=self.loading.is_unloaded)

    async def ReadHoldings(self, request, context):  # noqa: N802
        assert request.epoch == self.epoch
        rows = [
            worker_pb2.HeldRow(
                identity=row.identity,
                token_ids=pack_int32(row.token_ids),
                num_computed_tokens=min(row.num_computed, len(row.token_ids) - 1),
                block_ids=pack_int32(row.blocks),
                had_logprobs=row.with_logprobs,
            )
            for row in self.held_rows
            if row.identity and not row.stopped
        ]
        await context.write(worker_pb2.ReadHoldingsResponse(rows=rows))

    async def AwaitDrain(self, request, context):  # noqa: ARG002, N802
        await self.is_leaving.wait()
        return worker_pb2.AwaitDrainResponse()

    async def ResizePool(self, request, context):  # noqa: N802
        assert request.epoch == self.epoch
        self.was_asked_to_resize.set()
        await self.may_resize.wait()
        if self.resize_error is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.resize_error)
        for row in self.rows.values():
            assert max(row.blocks) < request.num_blocks, "a row has a block that goes"
        self.info.num_blocks = request.num_blocks
        return worker_pb2.ResizePoolResponse()

    async def DescribeDevice(self, request, context):  # noqa: N802, ARG002
        assert request.epoch <= self.epoch, "its scheduler asks, under the epoch that has attached"
        await self.lives.wait()
        return worker_pb2.DescribeDeviceResponse(
            worker=self.info,
            epoch=self.epoch if self.tells_epoch else 0,
            memory_level=self.memory_level,
        )

    def hang(self):
        """Hang as under SIGSTOP, until `go_on`."""
        self.lives.clear()
        self.pause()

    def go_on(self):
        self.lives.set()
        self.resume()

    async def Execute(self, batches, context):  # noqa: N802
        queue = asyncio.Queue()
        self.executing.add(queue)
        reader = asyncio.create_task(self._read(batches, queue))
        try:
            while (batch := await queue.get()) is not None:
                assert not self.loading.is_unloaded, "there is no model"
                if batch.epoch < self.epoch:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale batch")
                result = self.execute(batch)
                await asyncio.sleep(self.execute_s)
                await self.running.wait()
                await self._hold(batch)
                self.answered.append(batch.step_id)
                await context.write(result)
                if len(self.answered) == self.pause_at:
                    self.pause()
                    self.has_paused.set()
            if self.loading.is_unloaded:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is unloaded")
        finally:
            self.executing.remove(queue)
            self.was_left.set()
            reader.cancel()

    def go(self):
        """End the streams."""
        for queue in self.executing:
            queue.put_nowait(None)

    async def _read(self, batches, queue):
        async for batch in batches:
            async with self.received_one:
                self.received.append(batch.step_id)
                self.received_one.notify_all()
            queue.put_nowait(batch)
        queue.put_nowait(None)

    async def _hold(self, batch):
        """Hold the result until the next batch has come."""
        if len(self.answered) < self.hold_results_for_batches:
            async with self.received_one:
                await self.received_one.wait_for(lambda: self.received[-1] > batch.step_id)

    async def wait_for_batches(self, num_batches):
        async with self.received_one:
            await self.received_one.wait_for(lambda: len(self.received) >= num_batches)

    def execute(self, batch):
        assert not self.received or batch.step_id in self.received
        limits = worker_info_from_proto(self.info).limits
        plan = plan_from_proto(batch, limits, self._read_sampling)
        for row in plan.released_rows.tolist():
            del self.rows[row]
        for new in plan.new_sequences:
            self._admit(new)
            self.announced_at[self.rows[new.row].token_ids[0]] = plan.step_id
        if any(state.token_ids[0] == self.poison for state in self.rows.values()):
            raise RuntimeError("a step fails as a whole")
        for row, block in _pairs(plan.appended_rows, plan.appended_block_ids):
            self.rows[row].blocks.append(block)
        names = dict(_pairs(plan.renamed_src_block_ids, plan.renamed_dst_block_ids))
        for state in self.rows.values():
            state.blocks = [names.get(block, block) for block in state.blocks]
            assert max(state.blocks) < limits.num_blocks
        decoding = [row for row, state in self.rows.items() if self._decodes(state)]
        assert len(decoding) == plan.num_decodes, (plan.step_id, decoding, plan.num_decodes)
        sampling = [row for row in decoding if not self.rows[row].stopped]
        for row in sampling:
            self.rows[row].num_computed += 1
        for row, length in _pairs(plan.chunk_rows, plan.chunk_lens):
            state = self.rows[row]
            assert not state.started
            state.num_computed += length
            assert state.num_computed <= len(state.token_ids)
            if state.num_computed == len(state.token_ids):
                state.started = True
                sampling.append(row)
        for state in self.rows.values():
            assert state.num_computed <= len(state.blocks) * limits.block_size
        result = result_to_proto(self._sample(plan, sampling), batch.epoch)
        if self.wrong_results is not None:
            self.wrong_results(result)
        return result

    @staticmethod
    def _decodes(state):
        # A stopped row counts as decoding up to its length, because the scheduler cannot know yet.
        return state.started and len(state.token_ids) < state.max_total

    @staticmethod
    def _read_sampling(new, limits):
        assert new.sampling.HasField("seed")
        if new.sampling.HasField("adapter"):
            wanted = new.sampling.adapter
            adapter = limits.adapters[LoraAdapter(wanted.name, wanted.digest)]
            return sampling_from_proto(new.sampling), adapter
        return sampling_from_proto(new.sampling), 0

    def _admit(self, new):
        assert new.row not in self.rows
        token_ids = new.token_ids.tolist()
        self.rows[new.row] = Row(
            token_ids=token_ids,
            num_computed=new.num_computed_tokens,
            blocks=new.block_ids.tolist(),
            max_total=new.max_total_tokens,
            model_state=read_tokens(17 + new.output_index, token_ids),
            stop_token_ids=frozenset(new.sampling.stop_token_ids),
            with_logprobs=new.sampling.logprobs is not None,
            identity=new.identity,
        )
        self.num_computed_before.append(new.num_computed_tokens)

    def _sample(self, plan, sampling):
        for state in self.rows.values():
            if state.stopped and self._decodes(state):
                state.token_ids.append(0)  # a wasted slot
                state.num_computed += 1
        failed = [row for row in sampling if self.rows[row].token_ids[0] in self.failing_rows]
        sampling = [row for row in sampling if row not in failed]
        tokens, stopped, logprobs = [], [], []
        for index, row in enumerate(sampling):
            state = self.rows[row]
            token_id = state.model_state % VOCAB_SIZE
            state.token_ids.append(token_id)
            state.model_state = read_tokens(state.model_state, [token_id])
            tokens.append(token_id)
            if token_id in state.stop_token_ids:
                state.stopped = True
                stopped.append(row)
            if state.with_logprobs:
                num_top = self.num_top_logprobs
                top = ints([i % VOCAB_SIZE for i in range(num_top)])
                likely = StepLogprob(index, -float(token_id), top, np.full(num_top, -1, np.float32))
                logprobs.append(likely)
        for row in failed:
            self.rows[row].stopped = True
        return Result(
            plan.step_id,
            ints(sampling),
            ints(tokens),
            ints(stopped),
            ints(failed),
            logprobs=tuple(logprobs),
            execute_s=self.execute_s + 0.001,
        )


def _pairs(one, other):
    return zip(one.tolist(), other.tolist(), strict=True)

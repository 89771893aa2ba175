"""The device counts as idle while the host prepares a step; a fake device has a clock."""

import numpy as np
import pytest
import torch
from fake_graphs import FakeGraphs
from fake_model import VOCAB_SIZE, FakeModel, FakePool

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.step import executor as executor_part
from gpu_worker.step.block_moves import BlockMoves
from gpu_worker.step.executor import Executor
from gpu_worker.step.rows import Rows
from gpu_worker.step.timing import BusyClock

LIMITS = Limits(
    max_num_seqs=4,
    max_model_len=32,
    max_num_batched_tokens=32,
    num_blocks=32,
    block_size=4,
    vocab_size=VOCAB_SIZE,
)
PREPARES_MS, COMPUTES_MS = 5, 20


class FakeDevice:
    """A stream whose work begins when the host launches it, or after earlier work."""

    def __init__(self, monkeypatch):
        self.host_ms = 0.0
        self.free_ms = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(self))
        monkeypatch.setattr(executor_part, "BusyClock", lambda _: BusyClock(torch.device("cuda:0")))

    def launch(self, ms):
        self.free_ms = max(self.host_ms, self.free_ms) + ms

    def prepare(self, ms):
        self.host_ms += ms


class FakeEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.device.launch(0)
        self.ms = self.device.free_ms

    def query(self):
        return True

    def elapsed_time(self, later):
        return later.ms - self.ms


class Graphs(FakeGraphs):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def capture(self, compute):
        super().capture(compute)
        return lambda: self.device.launch(COMPUTES_MS)


class Model(FakeModel):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, *args):
        self.device.launch(COMPUTES_MS)
        return super().forward(*args)


@pytest.mark.parametrize("steps", ["decodes", "eager"])
def test_the_device_is_idle_while_the_host_moves_blocks_and_gathers_inputs(monkeypatch, steps):
    device = FakeDevice(monkeypatch)
    executor = Executor(Model(device), FakePool(32, 4), LIMITS, (), torch.device("cpu"))
    if steps == "decodes":
        executor.capture_decodes(Graphs(device), lambda _: None)
    for where, name in ((BlockMoves, "start"), (Rows, "blocks_of")):
        call = getattr(where, name)

        def prepare(*args, call=call):
            device.prepare(PREPARES_MS)
            return call(*args)

        monkeypatch.setattr(where, name, prepare)
    new = NewSequence(
        seq_id=1,
        row=0,
        token_ids=np.array([3, 4], np.int32),
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=np.arange(4, dtype=np.int32),
        sampling=SamplingParams(seed=0, temperature=0),
        max_total_tokens=16,
    )
    chunk = {"chunk_rows": np.array([0], np.int32), "chunk_lens": np.array([2], np.int32)}
    executor.launch(Plan(1, 0, new_sequences=(new,), **chunk))
    device.host_ms = device.free_ms = 100.0
    executor._busy.take_s()
    executor.launch(Plan(2, 1))
    idle_ms = device.host_ms - 100  # before the device had anything to compute
    assert idle_ms >= PREPARES_MS
    executor.launch(Plan(3, 1))  # prepared while the device computes
    assert device.free_ms == 100 + idle_ms + 2 * COMPUTES_MS
    assert executor._busy.take_s() == pytest.approx(2 * COMPUTES_MS / 1e3)


def test_a_failed_step_leaves_no_span(monkeypatch):
    device = FakeDevice(monkeypatch)
    clock = executor_part.BusyClock(None)
    clock.begin_step()
    clock.begin()  # and the step fails
    device.prepare(1000)
    clock.begin_step()
    clock.begin()
    device.launch(COMPUTES_MS)
    clock.begin()  # another part of the step
    clock.end()
    assert clock.take_s() == pytest.approx(COMPUTES_MS / 1e3)


def test_a_step_without_computation_is_not_busy(monkeypatch):
    FakeDevice(monkeypatch)
    clock = executor_part.BusyClock(None)
    clock.begin_step()
    clock.end()
    assert clock.take_s() == 0

"""The device has the rows' block tables, although steps send only what is new there."""

import numpy as np
import pytest
import torch
from fake_graphs import FakeGraphs
from fake_model import VOCAB_SIZE, FakeModel, FakePool

from contract.sampling import SamplingParams
from contract.step import NewSequence, Plan
from contract.worker_limits import Limits
from gpu_worker.step.executor import Executor
from gpu_worker.step.graphs import decode_graphs
from gpu_worker.step.graphs.device_tables import DeviceTables
from gpu_worker.step.rows import Rows

CPU = torch.device("cpu")


def limits_of(num_groups):
    return Limits(
        max_num_seqs=4,
        max_model_len=32,
        max_num_batched_tokens=32,
        num_blocks=100,
        block_size=2,
        vocab_size=VOCAB_SIZE,
        kv_windows=(None, 8)[:num_groups],
    )


def ints(*values):
    return np.array(values, np.int32)


def new(row, blocks, num_tokens=2):
    return NewSequence(
        seq_id=row,
        row=row,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=np.array(blocks, np.int32),
        sampling=SamplingParams(seed=0, temperature=0),
        max_total_tokens=30,
    )


class Tables:
    """Rows, and their tables on the device."""

    def __init__(self, num_groups):
        self.num_groups = num_groups
        self.rows = Rows(limits_of(num_groups))
        self.on_device = DeviceTables(limits_of(num_groups), CPU)

    def send(self, *which):
        """Send what is new, check the device's tables, and return how many entries were sent."""
        rows = np.array(which)
        news = self.on_device.news(self.rows, rows)
        if news:
            self.on_device.write(*map(torch.from_numpy, news))
        self.on_device.know(self.rows, rows)
        width = int(self.rows.num_blocks[rows].max())
        out = torch.empty(self.num_groups, len(rows), width, dtype=torch.int32)
        self.on_device.gather(torch.from_numpy(rows), out)
        for place, row in enumerate(which):
            num = self.rows.num_blocks[row]
            for group in range(self.num_groups):
                of_group = self.rows.block_tables[row, group : num * self.num_groups]
                expected = of_group[:: self.num_groups].tolist()
                assert out[group, place, :num].tolist() == expected
        return len(news[0]) if news else 0


@pytest.mark.parametrize("num_groups", [1, 2])
def test_only_new_entries_are_sent(num_groups):
    tables = Tables(num_groups)
    g = num_groups
    tables.rows.apply(
        Plan(1, 0, new_sequences=(new(2, range(10, 10 + 3 * g)), new(0, range(30, 30 + 2 * g))))
    )
    assert tables.send(0, 2) == 5 * g
    assert tables.send(0, 2) == 0
    blocks = np.arange(50, 50 + 2 * g, dtype=np.int32)
    tables.rows.apply(Plan(2, 0, appended_rows=ints(0, 2), appended_block_ids=blocks))
    assert tables.send(2) == g
    assert tables.send(0, 2) == g
    tables.rows.apply(Plan(3, 0, appended_rows=ints(2), appended_block_ids=blocks[:g]))
    tables.rows.apply(Plan(4, 0, appended_rows=ints(2), appended_block_ids=blocks[g:]))
    assert tables.send(0, 2) == 2 * g


def test_a_table_that_changes_is_sent_again():
    tables = Tables(2)
    tables.rows.apply(Plan(1, 0, new_sequences=(new(1, range(10, 14)), new(3, range(20, 24)))))
    assert tables.send(1, 3) == 8
    tables.rows.apply(Plan(2, 0, placements=ints(3, 1, 77)))
    assert tables.send(1, 3) == 4
    renamed = {"renamed_src_block_ids": ints(77, 11), "renamed_dst_block_ids": ints(78, 12)}
    tables.rows.apply(Plan(3, 0, **renamed))
    assert tables.send(1, 3) == 8
    tables.rows.apply(Plan(4, 0, released_rows=ints(1), new_sequences=(new(1, [5, 6]),)))
    assert tables.send(1, 3) == 2


def test_entries_that_were_not_written_are_sent_with_the_next_try():
    tables = Tables(1)
    tables.rows.apply(Plan(1, 0, new_sequences=(new(1, [4, 5]),)))
    tables.on_device.news(tables.rows, np.array([1]))  # and the step fails
    assert tables.send(1) == 2


def test_a_decode_sends_no_more_with_a_long_table(monkeypatch):
    sent = []
    upload_into = decode_graphs.upload_into

    def count(buffer, arrays):
        sent.append(sum(array.nbytes for array in arrays))
        return upload_into(buffer, arrays)

    executor = Executor(FakeModel(), FakePool(100, 2), limits_of(1), (), CPU)
    executor.capture_decodes(FakeGraphs(), lambda _: None)
    monkeypatch.setattr(decode_graphs, "upload_into", count)
    chunk = {"chunk_rows": ints(0), "chunk_lens": ints(20)}
    executor.step(Plan(1, 0, new_sequences=(new(0, range(15), 20),), **chunk))
    for step_id in range(2, 6):
        executor.step(Plan(step_id, 1))
    # row, position, length and slot of the only sequence; its table was sent before
    assert sent[1:] == [8 + 8 + 4 + 8] * 3

"""A worker's description on the wire."""

import pytest

from contract.codec.info import worker_info_from_proto, worker_info_to_proto
from contract.errors import InvalidArgumentError
from contract.info import WorkerInfo
from contract.worker_limits import Chunk, Limits


def info_with(kv_windows):
    limits = Limits(2, 64, 8, 100, 4, 10, kv_windows=kv_windows)
    return WorkerInfo("w0", "cpu", "model", limits, (), 64, "float32", instance_id=1)


@pytest.mark.parametrize(
    "kv_windows", [(None,), (8,), (None, 8), (None, Chunk(16)), (Chunk(16), None, 8)]
)
def test_windows_and_chunks_travel(kv_windows):
    message = worker_info_to_proto(info_with(kv_windows))
    assert worker_info_from_proto(message).limits.kv_windows == kv_windows


def test_a_scheduler_that_knows_no_chunks_keeps_all_blocks():
    message = worker_info_to_proto(info_with((Chunk(16), 8)))
    assert list(message.kv_windows) == [0, 8]


def test_another_number_of_chunks_than_groups_is_refused():
    message = worker_info_to_proto(info_with((None, Chunk(16))))
    message.kv_chunks.append(3)
    with pytest.raises(InvalidArgumentError, match="kv_chunks has 3 entries; kv_windows has 2"):
        worker_info_from_proto(message)

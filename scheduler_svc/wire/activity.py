"""Between what `DescribeActivity` asks and answers, and what is known of the workers' steps."""

from dataclasses import dataclass
from typing import Final

from contract.codec.info import memory_level_to_proto
from contract.errors import InvalidArgumentError
from quire.v1 import common_pb2
from scheduler_svc.core.compact.fragmentation import SpaceReport
from scheduler_svc.core.config import SchedulerLoad
from scheduler_svc.observers.step_log import MAX_STEPS, StepLog, StepRecord
from scheduler_svc.wire.load import load_to_proto

_DEFAULT_STEPS: Final = 256


@dataclass(frozen=True, slots=True)
class ActivityQuery:
    """Which steps to tell of."""

    max_steps: int
    after_step_id: int


def activity_query_from_proto(message: common_pb2.ActivityQuery) -> ActivityQuery:
    """Take what is asked for.

    Raises:
        InvalidArgumentError: A number is beyond its limit, or means nothing.
    """
    max_steps = message.max_steps if message.HasField("max_steps") else _DEFAULT_STEPS
    if max_steps > MAX_STEPS:
        raise InvalidArgumentError(
            "query.max_steps", f"is {max_steps}; it must be in [0, {MAX_STEPS}]"
        )
    if message.after_step_id and not message.worker:
        raise InvalidArgumentError(
            "query.after_step_id",
            f"is {message.after_step_id}, but query.worker is empty: each worker counts its own",
        )
    return ActivityQuery(max_steps, message.after_step_id)


def activity_to_proto(
    worker: str, log: StepLog, load: SchedulerLoad, space: SpaceReport, query: ActivityQuery
) -> common_pb2.WorkerActivity:
    """Say what a worker is doing."""
    return common_pb2.WorkerActivity(
        worker=worker,
        attached_at_s=log.attached_at_s,
        load=load_to_proto([load], 0, [space]),
        num_steps=log.totals.num_steps,
        num_prefill_tokens=log.totals.num_prefill_tokens,
        num_decode_tokens=log.totals.num_decode_tokens,
        num_preemptions=load.num_preemptions,
        busy_s=log.totals.busy_s,
        memory_level=memory_level_to_proto(load.memory_level),
        steps=map(_step_to_proto, log.latest(query.max_steps, query.after_step_id)),
    )


def unloaded_to_proto(worker: str) -> common_pb2.WorkerActivity:
    """Say that a worker has no model."""
    return common_pb2.WorkerActivity(worker=worker, is_unloaded=True)


def _step_to_proto(it: StepRecord) -> common_pb2.StepRecord:
    return common_pb2.StepRecord(
        step_id=it.step_id,
        answered_at_s=it.answered_at_s,
        execute_s=it.execute_s,
        rpc_s=it.rpc_s,
        num_prefill_tokens=it.num_prefill_tokens,
        num_decode_tokens=it.num_decode_tokens,
        num_running=it.num_running,
        num_waiting=it.num_waiting,
        num_preemptions=it.num_preemptions,
        num_swapped_out_blocks=it.num_swapped_out_blocks,
        num_swapped_in_blocks=it.num_swapped_in_blocks,
    )

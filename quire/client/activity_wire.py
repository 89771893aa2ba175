"""Between the contract's words for what workers do and `quire.client.activity_types`."""

from quire.client.activity_types import MemoryLevel, StepRecord, WorkerActivity
from quire.client.wire import load_from_proto
from quire.v1 import common_pb2, inference_pb2

_MEMORY_LEVELS = {
    common_pb2.MEMORY_LEVEL_WARNING: MemoryLevel.WARNING,
    common_pb2.MEMORY_LEVEL_CRITICAL: MemoryLevel.CRITICAL,
}


def activity_from_proto(
    response: inference_pb2.DescribeActivityResponse,
) -> tuple[WorkerActivity, ...]:
    """Take what the workers do."""
    return tuple(
        WorkerActivity(
            worker=worker.worker,
            attached_at_s=worker.attached_at_s,
            load=load_from_proto(worker.load),
            num_steps=worker.num_steps,
            num_prefill_tokens=worker.num_prefill_tokens,
            num_decode_tokens=worker.num_decode_tokens,
            num_preemptions=worker.num_preemptions,
            busy_s=worker.busy_s,
            is_unloaded=worker.is_unloaded,
            memory_level=_MEMORY_LEVELS.get(worker.memory_level, MemoryLevel.OK),
            steps=tuple(map(_step_from_proto, worker.steps)),
        )
        for worker in response.workers
    )


def _step_from_proto(step: common_pb2.StepRecord) -> StepRecord:
    return StepRecord(
        step_id=step.step_id,
        answered_at_s=step.answered_at_s,
        execute_s=step.execute_s,
        rpc_s=step.rpc_s,
        num_prefill_tokens=step.num_prefill_tokens,
        num_decode_tokens=step.num_decode_tokens,
        num_running=step.num_running,
        num_waiting=step.num_waiting,
        num_preemptions=step.num_preemptions,
        num_swapped_out_blocks=step.num_swapped_out_blocks,
        num_swapped_in_blocks=step.num_swapped_in_blocks,
    )

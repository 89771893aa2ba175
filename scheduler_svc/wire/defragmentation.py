"""What `Defragment` answers."""

from collections.abc import Mapping

from quire.v1 import scheduler_pb2
from scheduler_svc.core.compact.defragment import DefragmentationReport


def defragmentation_to_proto(
    reports: Mapping[str, DefragmentationReport],
) -> scheduler_pb2.DefragmentResponse:
    """Make the answer of what was done at each worker, by its target."""
    return scheduler_pb2.DefragmentResponse(
        workers=[
            scheduler_pb2.WorkerDefragmentation(
                worker=worker,
                rate_before=report.before.rate,
                rate_after=report.after.rate,
                num_moved_blocks=report.num_moved_blocks,
            )
            for worker, report in reports.items()
        ]
    )

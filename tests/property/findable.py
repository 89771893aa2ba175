"""Checks that each block that can be found by a hash has the right contents, in every tier.

A worker fails when it reads a wrong slot. But a short history ends before most cached blocks are
read, so a test could miss a wrong hash.
"""

from scheduler_svc.core.scheduler import Scheduler
from tests.property.disk import BROKEN
from tests.property.worker import VOID, FakeWorker


def check_findable(core: Scheduler, worker: FakeWorker) -> None:
    """Compare hashes with contents; `worker` has executed all plans so far."""
    tier = core.tier
    device = {block: worker.content(block) for block in core.pool._hash_to_block.values()}
    for where, pool, contents in (
        ("device", core.pool, device),
        ("host", tier.pool, worker.host),
        ("disk", tier.disk.pool, worker.disk.blocks),
    ):
        # swapped blocks of a sequence
        may_find = core.config.enable_prefix_caching or where != "device"
        assert may_find or not pool._hash_to_block
        for name, block in pool._hash_to_block.items():
            if where == "host" and tier.is_leaving_device(block):
                continue  # the next plan fills it
            content = contents[block]
            # a worker that reads a corrupt block detects it
            if BROKEN not in content and VOID not in content:
                assert worker.is_named(name, content), (
                    f"{where} block {block} is misnamed: {content}"
                )

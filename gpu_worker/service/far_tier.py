"""Copies host blocks to the far tier's store, and fills host blocks from this store."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from contract.arrays import Int32Array
from contract.hashing import BlockHash
from gpu_worker.service.kv_exchange import HostBlocks

if TYPE_CHECKING:
    from gpu_worker.kv.far_store import FarStore

_NUM_AT_ONCE: Final = 8
_FETCH_S: Final = 10.0
"""Limit on the duration of a fetch, because the request that waits for the fetch holds host blocks.
A fetch that reaches the limit begins no further reads."""


async def store_far(
    blocks: HostBlocks,
    far: "FarStore",
    block_ids: Int32Array,
    labels: Sequence[BlockHash],
    check: Callable[[], None],
) -> int:
    """Begin to store copies of host blocks, in order; return how many copies the store accepted.

    `block_ids`, int32[N], are host blocks of this worker. The first block that the store refuses,
    for example because its queue is full, is the last one tried. `check` is called after each copy,
    and raises if the block may have been overwritten before the copy.

    Raises:
        QuireError: See `read_host_blocks`.
    """
    for number, label in enumerate(labels):
        content = await blocks.read_host_blocks(block_ids[number : number + 1])
        check()
        if not far.store(label, content):
            return number
    return len(labels)


async def fetch_far(
    blocks: HostBlocks,
    far: "FarStore",
    block_ids: Int32Array,
    labels: Sequence[BlockHash],
    block_bytes: int,
    check: Callable[[], None],
) -> int:
    """Fill host blocks from the store, in order; return how many were filled.

    The fetch ends at the first content that the store lacks, or after `_FETCH_S` seconds. The first
    content is read alone: if the store lacks it, later contents would be read in vain.

    Args:
        blocks: This worker's host blocks.
        far: The store that has the contents.
        block_ids: int32[N], the blocks to fill; no block occurs twice.
        labels: Labels of the contents.
        block_bytes: Number of bytes of a host block.
        check: Called before each write; raises if the caller may no longer write to the blocks.
    """
    num_done, count = 0, 1
    deadline_s = time.monotonic() + _FETCH_S
    while num_done < len(labels) and time.monotonic() < deadline_s:
        wanted = labels[num_done : num_done + count]
        for content in await asyncio.gather(*map(far.load, wanted)):
            if content is None or len(content) != block_bytes:
                return num_done
            check()
            await blocks.write_host_blocks(block_ids[num_done : num_done + 1], content)
            num_done += 1
        count = _NUM_AT_ONCE
    return num_done

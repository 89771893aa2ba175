"""Reads other workers' host blocks with NIXL: by RDMA, or from process to process on one machine.

A read goes to a staging buffer, never directly to a host block, because the content must be checked
first. A failed read may still write to its buffer later, so that buffer is not used again.

Each worker has one object of NIXL, its *agent*. While one worker reads from another, both workers
must call their agents, because an agent connects and answers only during calls. NIXL's own thread
for these calls would always occupy a core, so Quire runs a thread only while another worker reads
(`serving`).
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from contract.arrays import Int32Array

Bytes = npt.NDArray[np.uint8]

_STAGING_BYTES: Final = 16 * 1024**2
"""Size of the staging buffer, unless one block is larger. A checksum and a copy of this size delay
a step by about 1 ms."""
_READ_S: Final = 5.0
"""Longest time of one read to the staging buffer; a read that takes longer counts as hung."""
_POLL_S: Final = 0.0001
_AVOID_S: Final = 60.0
"""How long a worker is avoided after a read from it has failed."""
_MAX_RETIRED: Final = 8
_MAX_PEERS: Final = 256


def load_agent(name: str) -> Any:
    """Start a NIXL agent with UCX; raises if NIXL is not installed or cannot run."""
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - an extra

    return nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))


class TransferFailedError(Exception):
    """The content was not read; the caller may use another transport."""


class NixlEngine:
    """Registers this worker's host blocks, and reads those of other workers.

    Called from one event loop. Any process that can connect to the agent's ports can read the
    registered memory.
    """

    def __init__(self, agent: Any, host_blocks: Bytes) -> None:
        """Register `host_blocks`, an array [blocks, bytes], which must exist until `close`."""
        self._agent = agent
        self._block_bytes: int = host_blocks.shape[1]
        self._host_blocks = host_blocks.reshape(-1)
        agent.register_memory(_region(self._host_blocks), "DRAM")
        self.agent_metadata: bytes = agent.get_agent_metadata()
        """What another worker's agent has to get before it can read from this agent."""
        self._staging = self._new_staging()
        self._turn = asyncio.Lock()
        """Held while the staging buffer is in use."""
        self._num_serving = 0
        self._reader = ThreadPoolExecutor(1, "nixl-read")
        self._server = ThreadPoolExecutor(1, "nixl-serve")
        self._calling = threading.Lock()
        """Held for each call to the agent."""
        self._peers: dict[bytes, str] = {}
        """Maps agents' metadata to their names, the most recently added last."""
        self._avoided: dict[int, float] = {}
        self._retired: deque[Bytes] = deque()
        """Buffers to which failed reads may still write. A buffer is kept until `_MAX_RETIRED`
        later reads have failed."""
        self._is_closed = False

    @property
    def address(self) -> int:
        """Address of host block 0."""
        return int(self._host_blocks.ctypes.data)

    @property
    def num_staged(self) -> int:
        """The largest number of blocks in one read."""
        return len(self._staging) // self._block_bytes

    def is_usable(self, instance_id: int) -> bool:
        """Whether `read` may be called for a worker: not after `close`, nor soon after `avoid`."""
        is_avoided = time.monotonic() < self._avoided.get(instance_id, 0.0)
        return not (self._is_closed or is_avoided)

    def avoid(self, instance_id: int) -> None:
        """Make `is_usable` false for a worker, for `_AVOID_S` seconds."""
        now_s = time.monotonic()
        self._avoided = {each: s for each, s in self._avoided.items() if s > now_s}
        self._avoided[instance_id] = now_s + _AVOID_S

    @contextlib.asynccontextmanager
    async def read(
        self, metadata: bytes, address: int, block_ids: Int32Array, checksum: int
    ) -> AsyncIterator[Bytes]:
        """Read host blocks of another worker, and yield their contents.

        The contents are valid only within the context.

        Args:
            metadata: The other worker's `agent_metadata`.
            address: The other worker's `address`.
            block_ids: int32[N]: the blocks, at most `num_staged`.
            checksum: CRC-32 of the contents.

        Raises:
            TransferFailedError: The contents could not be read.
        """
        async with self._turn:
            if self._is_closed:
                raise TransferFailedError("NIXL is closed")
            work = asyncio.get_running_loop().run_in_executor(
                self._reader, self._read, metadata, address, block_ids, checksum
            )
            try:
                yield await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # the read may still write to the buffer
                raise

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """In this context, let the NIXL agents of other workers read from this worker."""
        self._num_serving += 1
        if self._num_serving == 1 and not self._is_closed:
            self._server.submit(self._serve)
        try:
            yield
        finally:
            self._num_serving -= 1

    async def close(self) -> None:
        """End the agent: from now on no worker can read from this one. May be called twice."""
        async with self._turn:
            if self._is_closed:
                return
            self._is_closed = True
            await asyncio.to_thread(self._end)
        self._reader.shutdown(wait=False)
        self._server.shutdown(wait=False)

    def _read(self, metadata: bytes, address: int, block_ids: Int32Array, checksum: int) -> Bytes:
        from isal import isal_zlib  # noqa: PLC0415 - a simulated worker does not need it

        try:
            state = self._transfer(metadata, address, block_ids)
        except Exception as error:  # noqa: BLE001 - whatever the binding may raise
            state = repr(error)
        content = self._staging[: len(block_ids) * self._block_bytes]
        if state == "DONE" and isal_zlib.crc32(content) == checksum:
            return content
        with self._calling:
            self._forget_peer(metadata)
            self._retire_staging()
        reason = "the checksum differs" if state == "DONE" else state
        raise TransferFailedError(f"NIXL cannot read {len(block_ids)} blocks: {reason}")

    def _transfer(self, metadata: bytes, address: int, block_ids: Int32Array) -> str:
        """Read blocks to the staging buffer; return the last state of the transfer."""
        numbers = np.arange(len(block_ids), dtype=np.uint64)
        local = self._places(self._staging.ctypes.data, numbers)
        remote = self._places(address, block_ids.astype(np.uint64))
        with self._calling:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, "DRAM"),
                self._agent.get_xfer_descs(remote, "DRAM"),
                self._peer(metadata),
            )
            state: str = self._agent.transfer(handle)
        deadline_s = time.monotonic() + _READ_S
        while state == "PROC" and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            with self._calling:
                state = self._agent.check_xfer_state(handle)
        with self._calling:
            self._agent.release_xfer_handle(handle)  # cancels the transfer if it has not ended
        return state

    def _serve(self) -> None:
        while self._num_serving and not self._is_closed:
            with self._calling:
                if self._agent is not None:
                    # The call advances NIXL; there are no notifications.
                    self._agent.get_new_notifs()
            time.sleep(_POLL_S)

    def _places(self, address: int, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return uint64[N, 3]: address, length and device number of each block."""
        size = np.uint64(self._block_bytes)
        places = np.zeros((len(numbers), 3), np.uint64)
        places[:, 0] = np.uint64(address) + numbers * size
        places[:, 1] = size
        return places

    def _peer(self, metadata: bytes) -> str:
        if metadata not in self._peers:
            while len(self._peers) >= _MAX_PEERS:
                self._forget_peer(next(iter(self._peers)))
            self._peers[metadata] = self._agent.add_remote_agent(metadata)
        return self._peers[metadata]

    def _forget_peer(self, metadata: bytes) -> None:
        if (peer := self._peers.pop(metadata, None)) is not None:
            with contextlib.suppress(Exception):  # the worker is gone
                self._agent.remove_remote_agent(peer)

    def _new_staging(self) -> Bytes:
        num_blocks = max(1, _STAGING_BYTES // self._block_bytes)
        staging = np.zeros(num_blocks * self._block_bytes, np.uint8)
        self._agent.register_memory(_region(staging), "DRAM")
        return staging

    def _retire_staging(self) -> None:
        self._retired.append(self._staging)
        self._staging = self._new_staging()
        if len(self._retired) > _MAX_RETIRED:
            oldest = self._retired.popleft()
            regions = self._agent.get_reg_descs(_region(oldest), "DRAM")
            self._agent.deregister_memory(regions)

    def _end(self) -> None:
        with self._calling:
            for metadata in tuple(self._peers):
                self._forget_peer(metadata)
            self._agent = None  # closes its connections
        self._host_blocks = np.empty(0, np.uint8)


def _region(memory: Bytes) -> list[tuple[int, int, int, str]]:
    return [(memory.ctypes.data, memory.nbytes, 0, "")]

"""What runs the steps, named here by what the server does with it.

The server is up before torch is imported, which `step_loop.StepLoop` does.
"""

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from contract.step import Plan, Result
from gpu_worker.service.holdings import Holdings
from gpu_worker.service.kv_exchange import HostBlocks


class Steps(HostBlocks, Protocol):
    """Called from one event loop."""

    @property
    def num_rows_used(self) -> int:
        """Rows that hold a sequence."""

    async def attach(self, attachment: int) -> Holdings:
        """Forget all rows; obey only `attachment` from then on.

        Returns:
            What there was.
        """

    def submit(self, attachment: int, step: Plan) -> "asyncio.Future[Result]":
        """Queue a step; what it produces, or raises, comes in the future."""

    def resize_pool(self, num_blocks: int) -> Awaitable[None]:
        """Let the device have `num_blocks` blocks, after the steps taken so far.

        Whoever attaches after this call finds it done.
        """

"""Rank 0's executor: whatever it does, the other ranks are told to do, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from contract.errors import QuireError, UnimplementedError
from contract.state import Holdings
from contract.step import Plan, Result
from gpu_worker.lora.adapter import Adapter
from gpu_worker.parallel.leader import Leader
from gpu_worker.parallel.link import Frame, Kind
from gpu_worker.step.block_labels import BlockLabels
from gpu_worker.step.executor import Executor, LaunchedStep
from gpu_worker.step.rows import Rows


class LeadingExecutor:
    """An `Executor`, as the step loop calls it, and those of the other ranks behind it.

    A step that is refused is refused by all ranks alike, before any of them computes. If a step
    fails otherwise, others may be in the middle of it, and the group ends.
    """

    def __init__(self, executor: Executor, leader: Leader) -> None:
        self._executor = executor
        self._leader = leader
        self.max_in_flight = executor.max_in_flight
        self.bind_thread = executor.bind_thread
        self.close = executor.close

    @property
    def rows(self) -> Rows:
        """Rank 0's; the others' are the same."""
        return self._executor.rows

    @property
    def labels(self) -> BlockLabels:
        """Rank 0's; the others' are the same."""
        return self._executor.labels

    @property
    def host_pool(self) -> None:
        """None to read or write: each rank has its part of a block."""
        return

    def launch(self, step: Plan) -> LaunchedStep:
        """See `Executor.launch`."""
        assert step.serialize is not None, "a step of the scheduler's"
        self._leader.tell(Frame(Kind.LAUNCH, step.serialize()))
        with self._together():
            return self._executor.launch(step)

    def collect(self, launched: LaunchedStep) -> Result:
        """See `Executor.collect`."""
        with self._together():
            output = self._executor.collect(launched)
        self._leader.tell(Frame(Kind.COLLECT))
        return output

    def reset(self) -> Holdings:
        """See `Executor.reset`."""
        self._leader.tell(Frame(Kind.RESET))
        with self._together():
            return self._executor.reset()

    def distrust(self) -> None:
        """See `Executor.distrust`."""
        self._leader.tell(Frame(Kind.DISTRUST))
        with self._together():
            self._executor.distrust()

    def resize_pool(self, num_blocks: int) -> None:
        """Refuse: each rank has a pool of its own."""
        raise UnimplementedError(
            f"num_blocks is {num_blocks}: a pool that is in parts on several devices is not resized"
        )

    def add_adapter(self, number: int, adapter: Adapter) -> None:  # noqa: ARG002
        """Refuse: each rank would need its part."""
        raise UnimplementedError("a model that is in parts on several devices has no adapters")

    def remove_adapter(self, number: int) -> None:
        """There is none."""

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except QuireError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others do not have it
            self._leader.give_up(f"rank 0 failed at a step: {error!r}")


AnyExecutor: TypeAlias = Executor | LeadingExecutor
"""What a step loop calls."""

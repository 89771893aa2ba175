"""Rank 0's executor, which also sends every call to the other ranks."""

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
    """The step loop's executor on rank 0: drives the executors of all ranks.

    All ranks refuse a bad step in the same way, before any of them computes. If rank 0 fails in
    another way, the other ranks may still compute the step, so all ranks end.
    """

    def __init__(self, executor: Executor, leader: Leader) -> None:
        self._executor = executor
        self._leader = leader
        self.max_in_flight = executor.max_in_flight
        self.bind_thread = executor.bind_thread
        self.close = executor.close

    @property
    def rows(self) -> Rows:
        """Rank 0's rows, which are the same in all ranks."""
        return self._executor.rows

    @property
    def labels(self) -> BlockLabels:
        """Rank 0's labels, which are the same in all ranks."""
        return self._executor.labels

    @property
    def host_pool(self) -> None:
        """None: each rank has only a part of a block, so whole blocks cannot be read or written."""
        return

    def launch(self, plan: Plan) -> LaunchedStep:
        assert plan.serialize is not None, "the plan has its message"
        self._leader.send(Frame(Kind.LAUNCH, plan.serialize()))
        with self._together():
            return self._executor.launch(plan)

    def collect(self, launched: LaunchedStep) -> Result:
        with self._together():
            output = self._executor.collect(launched)
        self._leader.send(Frame(Kind.COLLECT))
        return output

    def reset(self) -> Holdings:
        self._leader.send(Frame(Kind.RESET))
        with self._together():
            return self._executor.reset()

    def distrust(self) -> None:
        self._leader.send(Frame(Kind.DISTRUST))
        with self._together():
            self._executor.distrust()

    def resize_pool(self, num_blocks: int) -> None:
        """Refuse: all ranks would have to resize their pools, and there is no code for that."""
        raise UnimplementedError(
            f"num_blocks is {num_blocks}: a pool on several devices cannot be resized"
        )

    def add_adapter(self, number: int, adapter: Adapter) -> None:
        """See `Executor.add_adapter`.

        `adapter` must be the adapter that was loaded last with `load_on_all_ranks`, because each
        other rank adds the adapter that it has read last.
        """
        self._leader.send(Frame(Kind.ADD_ADAPTER, str(number).encode()))
        with self._together():
            self._executor.add_adapter(number, adapter)

    def remove_adapter(self, number: int) -> None:
        self._leader.send(Frame(Kind.REMOVE_ADAPTER, str(number).encode()))
        with self._together():
            self._executor.remove_adapter(number)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except QuireError:
            raise
        except Exception as error:  # noqa: BLE001 - other ranks may still compute the step
            self._leader.give_up(f"rank 0 failed at a step: {error!r}")


AnyExecutor: TypeAlias = Executor | LeadingExecutor
"""The executor of a step loop."""

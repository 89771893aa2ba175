"""The adapters that rows have, by number. One that goes stays until no row has it any more."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gpu_worker.lora.adapter import Adapter
from gpu_worker.step.rows import Rows

NO_ADAPTERS: Final[Mapping[int, Adapter]] = MappingProxyType({})


class AdapterTable:
    """A worker's adapters; changed between steps, by the thread that runs them.

    A row may outlive the scheduler's knowledge of it: one that is cancelled decodes until a step
    releases it. So nobody but the table can tell when an adapter is of no more use.
    """

    def __init__(self, adapters: Mapping[int, Adapter], rows: Rows) -> None:
        self._adapters = dict(adapters)
        self._rows = rows
        self._leaving: set[int] = set()

    @property
    def by_number(self) -> Mapping[int, Adapter]:
        """Those that rows may have, as they are at each moment."""
        return self._adapters

    def add(self, number: int, adapter: Adapter) -> None:
        """Take one in, by a number that none has had."""
        self._adapters[number] = adapter

    def remove(self, number: int) -> None:
        """Let go of one as soon as no row has it; from now on no new one may."""
        self._leaving.add(number)
        self.free_unused()

    def free_unused(self) -> None:
        """Free those that go and that no row has; to be called when rows are released."""
        if not self._leaving:  # as nearly always
            return
        used = set(self._rows.adapter[self._rows.is_used].tolist())
        for number in self._leaving - used:
            self._leaving.remove(number)
            del self._adapters[number]

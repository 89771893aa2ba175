"""Lists the kernels that Triton compiles, or reads from its disk cache, in a `with` block."""

from types import TracebackType
from typing import Any, Self

from triton import knobs


class Compilations:
    """Lists the kernels that Triton compiles or loads within the block.

    Triton 3.6 and 3.9 tell this listener of each variant of a kernel that a process has not
    launched before. A variant that is read from the disk counts, because on another machine it
    would be compiled.
    """

    def __init__(self) -> None:
        self.kernels: list[str] = []
        """The names of the kernels, one for each variant."""
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        knobs.compilation.listener = self._before

    def _note(self, *, src: Any, **_: Any) -> None:
        self.kernels.append(str(src.name))

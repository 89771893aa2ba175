"""What `with` closes."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closes(ABC):
    """Something with a `close`, which the end of a `with` calls."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

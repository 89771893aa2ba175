"""Marks the methods that change a core, so that a recorder gets each call of such a method."""

import functools
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MARK: Final = "is_core_input"


class Recorder(Protocol):
    """Records the calls of a core's marked methods; each call goes through the recorder."""

    def call(self, method: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call `method(*args, **kwargs)`, where `args[0]` is the core, and return the result."""


class Recordable(Protocol):
    """A core that may have a recorder."""

    @property
    def recorder(self) -> Recorder | None: ...


_Core = TypeVar("_Core", bound=Recordable)


def core_input(
    method: Callable[Concatenate[_Core, _P], _R],
) -> Callable[Concatenate[_Core, _P], _R]:
    """Mark a method that changes a core; its calls go through the core's recorder, if there is one.

    A core's plans follow from its configuration and the calls of its marked methods. A marked
    method must not call another marked method: both calls would be recorded, and a replay would
    make the inner call twice.
    """

    @functools.wraps(method)
    def call(core: _Core, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if core.recorder is None:
            return method(core, *args, **kwargs)
        return core.recorder.call(method, core, *args, **kwargs)

    call.__dict__[_MARK] = True
    return call


def input_names(kind: type) -> tuple[str, ...]:
    """Return the names of the marked methods of a class."""
    return tuple(name for name, member in vars(kind).items() if hasattr(member, _MARK))

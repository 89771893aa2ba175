"""What a process says of itself: what it is doing, whether it is ready, what is wrong with it."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class _State:
    ready: bool
    status: str
    progress: float | None
    final: bool = False


@dataclass(slots=True)
class Health:
    """Readiness, which the process declares, and liveness, which is asked of its parts.

    The methods may be called from any thread. Callbacks run in the caller's.
    """

    _state: _State = field(default=_State(ready=False, status="starting", progress=None))
    _checks: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def set_starting(self, status: str, progress: float | None = None) -> None:
        """Not ready yet: `status` says what is being done, `progress` how far, in [0, 1]."""
        self._set(_State(ready=False, status=status, progress=progress))

    def set_ready(self, but: str | None = None) -> None:
        """Ready for requests; `but` says what is not as it should be nevertheless."""
        status = "ready" if but is None else f"ready, but {but}"
        self._set(_State(ready=True, status=status, progress=None))

    def set_not_ready(self, reason: str) -> None:
        """Not ready any more, and why: "no worker is attached"."""
        self._set(_State(ready=False, status=reason, progress=None))

    def set_draining(self) -> None:
        """Not ready and never again, whatever the process's parts still declare."""
        self._set(_State(ready=False, status="draining", progress=None, final=True))

    def add_liveness(self, name: str, check: Callable[[], str | None]) -> None:
        """Ask `check` at each probe; it answers at once, with what is wrong or None."""
        self._checks[name] = check

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change of what the process declares."""
        self._callbacks.append(callback)

    @property
    def ready(self) -> bool:
        """Declared ready, and no liveness check fails."""
        return self._state.ready and not self.failures()

    @property
    def status(self) -> str:
        """What the process is doing, for a person; "ready" if it is declared ready, without but."""
        return self._state.status

    @property
    def progress(self) -> float | None:
        """How far a long start is, in [0, 1], if that is known."""
        return self._state.progress

    def failures(self) -> dict[str, str]:
        """What is wrong, by the name of the check; empty if nothing is."""
        found: dict[str, str] = {}
        for name, check in tuple(self._checks.items()):
            problem = check()
            if problem is not None:
                found[name] = problem
        return found

    def _set(self, state: _State) -> None:
        if self._state.final:
            return
        # One assignment of an immutable value: a reader in another thread never sees half a change.
        self._state = state
        for callback in tuple(self._callbacks):
            callback()

"""Which workers a scheduler has: an engine runs for each that is there, and they come and go."""

from collections.abc import Callable

from rpc.peers.discovery import Discovery, keep_members
from scheduler_svc.workers.engine import Engine
from scheduler_svc.workers.fleet import Fleet


async def keep_engines(
    discovery: Discovery,
    fleet: Fleet,
    *,
    make_engine: Callable[[str], Engine],
    forget: Callable[[str], None],
) -> None:
    """Add to the fleet who is discovered, and take from it who is gone for good, until cancelled.

    For good means: neither discovered any more nor attached. A worker that only DNS has lost works
    on; one that has only died is waited for.

    Args:
        discovery: Says which workers there are.
        fleet: Owns the engines.
        make_engine: Makes the engine of a target.
        forget: Is told of targets that are gone.

    Raises:
        StaleEpochError: A newer scheduler has taken over.
        BrokenInvariantError: An engine has a bug.
    """

    def join(target: str) -> Engine:
        engine = make_engine(target)
        fleet.add(engine)
        return engine

    def left(engine: Engine) -> None:
        fleet.remove(engine)
        forget(engine.target)

    fleet.begin()
    try:
        await keep_members(
            discovery, join=join, may_leave=lambda engine: engine.session is None, left=left
        )
    except Exception:
        fleet.note_failure()
        raise

"""Lets a client's call that resumes a request wait until the scheduler sends the request."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from contract.errors import QuireError
from router.live.live_request import LiveRequest
from router.schedulers.messages import Resumption

StartResumed: TypeAlias = Callable[[Resumption], LiveRequest]
"""Makes a live request, without its events so far, from a `Resumption`."""


class ResumingCalls:
    """The calls that resume a request and wait until the scheduler sends it.

    The key of a call is the first sequence key of the resumed request.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[StartResumed, asyncio.Future[LiveRequest]]] = {}

    async def wait(self, first_seq_key: int, start: StartResumed) -> LiveRequest:
        """Return the request that `answer` makes; if `fail` is called instead, raise its error."""
        answer: asyncio.Future[LiveRequest] = asyncio.get_running_loop().create_future()
        self._calls[first_seq_key] = start, answer
        try:
            return await answer
        except asyncio.CancelledError:
            # The answer arrived at the same moment; close the request, which has no reader.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await answer.result().aclose()
            raise
        finally:
            self._calls.pop(first_seq_key, None)

    def answer(
        self, resumption: Resumption, replay: Callable[[LiveRequest], None]
    ) -> LiveRequest | None:
        """Make the live request for the call that waits for it; return None if no call waits.

        The `start` of the waiting call makes the request, and `replay` pushes the request's past
        events.

        Errors of `start` and `replay` are raised both by this method and by the call's `wait`.
        """
        start, answer = self._calls.pop(resumption.record.first_seq_key, (None, None))
        if start is None or answer is None or answer.done():
            return None
        try:
            live = start(resumption)
            replay(live)
        except QuireError as error:
            answer.set_exception(error)
            raise
        answer.set_result(live)
        return live

    def fail(self, first_seq_key: int, error: QuireError) -> bool:
        """Let the call that waits for this key fail with `error`; return False if none waits."""
        _, answer = self._calls.pop(first_seq_key, (None, None))
        if answer is not None and not answer.done():
            answer.set_exception(error)
        return answer is not None

    def fail_all(self, error: QuireError) -> None:
        """Let all calls fail with an error."""
        for first_seq_key in list(self._calls):
            self.fail(first_seq_key, error)

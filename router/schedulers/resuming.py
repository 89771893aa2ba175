"""The calls that wait for the scheduler to hand them a request that they resume."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from contract.errors import QuireError
from router.request.live import LiveRequest
from router.schedulers.messages import Resumption

StartResumed: TypeAlias = Callable[[Resumption], LiveRequest]
"""Makes a live request of one that is resumed, to which nothing has been pushed."""


class ResumingCalls:
    """By the first key that each request will have. Belongs to the scheduler client."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[StartResumed, asyncio.Future[LiveRequest]]] = {}

    async def wait(self, first_seq_key: int, start: StartResumed) -> LiveRequest:
        """Waits for the answer; raises what `fail` is given."""
        answer: asyncio.Future[LiveRequest] = asyncio.get_running_loop().create_future()
        self._calls[first_seq_key] = start, answer
        try:
            return await answer
        except asyncio.CancelledError:
            # Answered at the same moment: the request must not be left without a reader.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await answer.result().aclose()
            raise
        finally:
            self._calls.pop(first_seq_key, None)

    def answer(
        self, resumption: Resumption, replay: Callable[[LiveRequest], None]
    ) -> LiveRequest | None:
        """Starts the request and has `replay` bring it to where it is; None: nobody waits.

        What `start` and `replay` raise, the call gets as well.
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
        """Answers with an error; False if this is no key of a waiting call."""
        _, answer = self._calls.pop(first_seq_key, (None, None))
        if answer is not None and not answer.done():
            answer.set_exception(error)
        return answer is not None

    def fail_all(self, error: QuireError) -> None:
        """Answers all with an error."""
        for first_seq_key in list(self._calls):
            self.fail(first_seq_key, error)

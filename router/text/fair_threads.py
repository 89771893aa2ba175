"""Threads for tokenizing and similar work, with a limit on tasks and fairness among tenants."""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from contract.errors import TooBusyError
from router.access.api_keys import tenant_of_call

T = TypeVar("T")


class TextThreads:
    """Runs one kind of work in threads; the tenants of API keys take turns.

    Without API keys, all work belongs to one tenant.
    """

    def __init__(self, kind: str, *, num_threads: int, max_pending: int) -> None:
        """At most `max_pending` tasks wait or run; `kind` describes the tasks in errors.

        If more tasks come, the tenant with the most waiting tasks loses its newest task.
        """
        self._kind = kind
        self._max_pending = max_pending
        self._num_pending = 0
        self._lock = threading.Lock()
        self._tenant_to_tasks: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = (
            OrderedDict()
        )
        """Waiting tasks by tenant. The first tenant is served next, and then becomes the last
        one."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=kind)

    @property
    def num_pending(self) -> int:
        """Number of tasks that wait or run, including tasks whose caller has left."""
        return self._num_pending

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, unless the caller is cancelled before `work` starts.

        Raises `TooBusyError` if too many tasks wait or run, and `work` is the task that is dropped
        (see `__init__`).
        """
        tenant = tenant_of_call()
        lost: Future[Any] | None = None
        with self._lock:
            if self._num_pending >= self._max_pending:
                lost = self._take_newest_of_another(tenant)
                if lost is None:
                    raise self._too_busy()
            self._num_pending += 1
            future: Future[T] = Future()
            tasks = self._tenant_to_tasks.setdefault(tenant, deque())
            tasks.append((future, work))
        if lost is not None:
            lost.set_exception(self._too_busy())
        # The task counts until its thread is done, even if the caller stops waiting before that.
        future.add_done_callback(self._end)
        self._threads.submit(self._run_next)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future, lost, tasks, work  # the error refers to this frame; break the cycle

    def close(self) -> None:
        """Stop the threads after their current tasks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _too_busy(self) -> TooBusyError:
        return TooBusyError(
            f"{self._max_pending} {self._kind} calls are pending, which is the limit"
        )

    def _take_newest_of_another(self, tenant: str) -> "Future[Any] | None":
        """Remove and return the newest waiting task of the tenant that has the most waiting tasks.

        Returns None if no tenant has more waiting tasks than `tenant` will have with its new task.
        """
        num_own = len(self._tenant_to_tasks.get(tenant, ())) + 1
        while True:
            longest = max(self._tenant_to_tasks.values(), key=len, default=deque())
            if len(longest) <= num_own:
                return None
            future, _ = longest.pop()
            if future.set_running_or_notify_cancel():  # otherwise its caller has left
                return future

    def _run_next(self) -> None:
        with self._lock:
            if not self._tenant_to_tasks:  # another tenant has displaced the task
                return
            tenant, tasks = self._tenant_to_tasks.popitem(last=False)
            future, work = tasks.popleft()
            if tasks:
                self._tenant_to_tasks[tenant] = tasks
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            future.set_exception(error)
        finally:
            del future, tasks, work  # as in `run`

    def _end(self, _: "Future[Any]") -> None:
        with self._lock:
            self._num_pending -= 1

"""Copies prefixes between workers, so that a request need not compute its prefix again.

Placement may choose a worker that is less busy than the worker with the request's prefix. If
copying the blocks that the chosen worker lacks is faster than computing them, the request waits for
the copy, at most as long as computing would take. Each copy improves the estimate of how
long copies take.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from contract.errors import FailedPreconditionError, QuireError
from contract.hashing import BlockHash
from rpc.tasks import BackgroundTasks
from scheduler_svc.workers.kv.copy import KvCopy, check_exchange, keeps_kv
from scheduler_svc.workers.session import Session

_FIRST_FIXED_S: Final = 0.01
"""The assumed fixed time of a copy, before any copy has been measured. It is about the time of a
decode step and of a copy's two calls, `PullKv` and `ReadKv`. If the value is too low, the first
copy corrects it. If the value is too high, no copy is made that could correct it. On two busy CPU
cores, a small copy took 0.22 s."""
_FIRST_BYTES_PER_S: Final = 1e9
"""The assumed rate of a copy, before any copy has been measured."""
_WEIGHT: Final = 1 / 4
"""The n-th measurement has the weight 1 / n in the moving averages, but never less than this."""
_MAX_JUMP: Final = 8.0
"""A copy counts as at most this many times the expected time, because one copy may have stalled."""
_FORGET_S: Final = 60.0
"""When the last measurement is this old, the initial values are used again, because a slow link may
have recovered."""
LEAST_TOKENS: Final = 256
"""Fewer tokens than this are computed, not copied: a copy waits for the steps of both workers."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """A prefix to copy from the worker `giving` to the worker `taking`."""

    source_target: str
    giving: Session
    taking: Session
    hashes: Sequence[BlockHash]
    num_bytes: int
    compute_s: float
    """How long computing the prefix would take."""


class CopyTimes:
    """Estimates the time of a copy: a fixed part, and a part for each byte.

    If a copy takes more or less time than expected, each part changes in proportion to its share of
    the expected time. So small copies mostly adjust the fixed part, and large copies the rate. This
    is a normalized LMS filter.
    """

    def __init__(self) -> None:
        self._measured_s = -_FORGET_S
        self._forget()

    def seconds(self, num_bytes: float) -> float:
        """Return how many seconds a copy of this size is expected to take."""
        if time.monotonic() - self._measured_s > _FORGET_S:
            self._forget()
        return self._fixed_s + num_bytes * self._byte_s

    def measure(self, num_bytes: float, took_s: float) -> None:
        """Learn from a copy; `took_s` is infinite if the copy failed."""
        expected_s = self.seconds(num_bytes)
        self._num_measured += 1
        weight = max(_WEIGHT, 1 / self._num_measured)
        error = weight * (min(took_s / expected_s, _MAX_JUMP) - 1)
        fixed_share = self._fixed_s / expected_s
        bytes_share = 1 - fixed_share
        error /= fixed_share**2 + bytes_share**2
        self._fixed_s *= max(0.5, 1 + error * fixed_share)
        self._byte_s *= max(0.5, 1 + error * bytes_share)
        self._measured_s = time.monotonic()

    def _forget(self) -> None:
        self._fixed_s, self._byte_s = _FIRST_FIXED_S, 1 / _FIRST_BYTES_PER_S
        self._num_measured = 0


class PrefixPulls:
    """Decides which prefixes to copy from worker to worker, and copies them."""

    def __init__(self) -> None:
        self._tasks = BackgroundTasks()
        self._copies: dict[tuple[Session, BlockHash], asyncio.Task[None]] = {}
        """Copies in progress, by the hash of the first block and the worker that gets the blocks.
        """
        self._times = CopyTimes()

    def find(
        self, hashes: Sequence[BlockHash], taking: Session, others: dict[str, Session]
    ) -> Pull | None:
        """Return a pull that is faster than computing the prompt's prefix; None: there is none.

        The pull copies from the worker that has cached the longest part of the prompt.

        Args:
            hashes: The hashes of the prompt's full blocks.
            taking: The worker that will compute the prompt.
            others: The workers that may give the prefix, by address; `taking` may be among them.
        """
        info = taking.info
        if not (hashes and keeps_kv(taking) and info.prefill_tokens_per_s):
            return None
        num_there = taking.num_cached_blocks(hashes)
        most, found = num_there + LEAST_TOKENS // taking.block_size, None
        for target, giving in others.items():
            if giving is taking or not keeps_kv(giving) or giving.trouble() is not None:
                continue
            if giving.block_size != taking.block_size or not _can_exchange(giving, taking):
                continue
            if (num_blocks := giving.num_cached_blocks(hashes)) > most:
                most, found = num_blocks, (target, giving)
        if found is None:
            return None
        num_blocks = most - num_there
        compute_s = num_blocks * taking.block_size / info.prefill_tokens_per_s
        num_bytes = num_blocks * info.block_bytes
        if self._times.seconds(num_bytes) >= compute_s:
            return None
        return Pull(found[0], found[1], taking, hashes[num_there:most], num_bytes, compute_s)

    def start(self, pull: Pull, then: Callable[[], None]) -> None:
        """Copy a prefix; call `then` when the copy has succeeded, has failed or takes too long.

        Requests with the same prefix that arrive together share one copy.
        """
        key = pull.taking, pull.hashes[0]
        if (copying := self._copies.get(key)) is None:
            copying = self._copies[key] = self._tasks.start(self._copy(pull))
            copying.add_done_callback(lambda _: self._copies.pop(key))
        self._tasks.start(ends_in_time(copying, pull.compute_s, then))

    def stop(self) -> None:
        """Cancel the copies in progress; called when the sessions end."""
        self._tasks.stop()

    async def _copy(self, pull: Pull) -> None:
        started_s = time.monotonic()
        copy = KvCopy(pull.source_target, pull.giving, pull.taking)
        try:
            while await copy.extend(pull.hashes):
                pass  # the source copies a bounded number to its host at a time
            copy.receive()
        except QuireError as error:
            log.warning("a prefix was not copied", source=pull.source_target, reason=str(error))
            copy.give_up()
            self._times.measure(pull.num_bytes, math.inf)
        else:
            share = 1 - copy.num_missing(pull.hashes) / len(pull.hashes)
            if share:  # if 0, the source had the blocks only on disk, or had evicted them
                self._times.measure(share * pull.num_bytes, time.monotonic() - started_s)


async def ends_in_time(
    copying: asyncio.Task[None], within_s: float, then: Callable[[], None]
) -> None:
    """Call `then` when the task `copying` has ended, or after `within_s`."""
    await asyncio.wait((copying,), timeout=within_s)
    then()


def _can_exchange(giving: Session, taking: Session) -> bool:
    with contextlib.suppress(FailedPreconditionError):
        check_exchange(giving, taking)
        return taking.info.limits.kv_windows == giving.info.limits.kv_windows == (None,)
    return False

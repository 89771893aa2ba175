"""Runs a target: the corpus, a short pass that is the same each time, or a long hunt."""

import contextlib
import faulthandler
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz.corpus import paths_of, read_case
from tests.fuzz.target import Case, Check, Target

_HANG_S = 60.0
"""The slowest case takes milliseconds; a process that hangs says where, and ends."""
_ANY_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_ROUND = 100
"""Cases between two looks at the clock."""


def try_corpus(target: Target) -> int:
    """Run all cases of the corpus; return how many there are."""
    paths = list(paths_of(target))
    with target.open() as check:
        for path in paths:
            try:
                check(read_case(path, target.kind))
            except Exception as error:
                error.add_note(f"case {path}")
                raise
    return len(paths)


def short_pass(target: Target) -> None:
    """Draw the same few cases each time; raise what the smallest bad one makes the check raise."""
    with target.open() as check:
        _draw(target, check, target.num_examples, derandomize=True)


@dataclass(frozen=True, slots=True)
class Found:
    """A bad case, made small, and what the check raises for it."""

    case: Case
    error: Exception


def hunt(target: Target, until: float, seed: int) -> tuple[int, Found | None]:
    """Draw other cases until a time (monotonic), or one is bad; return how many there were."""
    rng = random.Random(seed)
    num_cases = 0
    last: Case = ()
    with target.open() as check:

        def counted(case: Case) -> None:
            nonlocal num_cases, last
            num_cases += 1
            last = case
            with _no_hang():
                check(case)

        while time.monotonic() < until:
            try:
                _draw(target, counted, _ROUND, seed=rng.getrandbits(64))
            except Exception as error:  # noqa: BLE001 - it is what is hunted for
                return num_cases, Found(last, error)  # the smallest comes last
    return num_cases, None


def _draw(
    target: Target,
    check: Check,
    max_examples: int,
    *,
    derandomize: bool = False,
    seed: int | None = None,
) -> None:
    @settings(
        max_examples=max_examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=_ANY_SPEED,
        report_multiple_bugs=False,
    )
    @given(target.cases)
    def run(case: Case) -> None:
        check(case)

    (run if seed is None else seeded(seed)(run))()


@contextlib.contextmanager
def _no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(_HANG_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()

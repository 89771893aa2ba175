"""Tries mutants: runs the tests that call the changed function, with the fault in it.

The tests that detect a fault mostly take less time than importing and collecting them. Therefore
this is a plugin of pytest: when pytest has collected the tests, each trial is a fork of its
process. The fork replaces the code of one function and runs the tests that call it, the shortest
first.
"""

import gc
import inspect
import math
import os
import pickle
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import pytest

from tests.mutation.mutants import Mutant

_BROKEN = 70
"""Exit code of a trial that failed outside the tests."""
_MAX_BYTES = 4 << 30
"""A mutant that hangs may fill lists."""


class Verdict(Enum):
    """The tests' verdict on a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"  # it hangs; this counts as detected
    SURVIVED = "survived"


class _Place(NamedTuple):
    """Where a function begins."""

    file: str
    line: int


class _Run(NamedTuple):
    """How a test runs without a fault."""

    passed: bool
    taken_s: float
    """Processor time, with what it takes to note the functions."""
    called: set[_Place]


def try_mutants(
    root: Path,
    mutants: Sequence[Mutant],
    tests: Sequence[str],
    num_jobs: int,
    report: Callable[[Mutant, Verdict], None],
) -> int:
    """Try mutants of the tree `root`, which must be the working directory.

    Args:
        tests: Arguments of pytest.
        num_jobs: Number of trials at a time.
        report: Is called with each verdict.

    Returns:
        0, or pytest's exit code if the tests fail without any fault.
    """
    # only whether it fails counts: no shrinking, no tracebacks
    options = "-q -s --tb=no --assert=plain -p no:randomly -p no:cacheprovider"
    profile = "--hypothesis-profile=mutation"
    trials = _Trials(root, mutants, num_jobs, report)
    exit_code = pytest.main([*options.split(), profile, *tests], [trials])
    return 0 if exit_code == pytest.ExitCode.NO_TESTS_COLLECTED else exit_code


class _Trials:
    """A plugin of pytest, which tries mutants in place of running the tests once."""

    def __init__(
        self,
        root: Path,
        mutants: Sequence[Mutant],
        num_jobs: int,
        report: Callable[[Mutant, Verdict], None],
    ) -> None:
        self._root = root
        self._mutants = mutants
        self._num_jobs = num_jobs
        self._report = report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be imported")
        functions, caches = _functions_in(self._root), _caches_in(self._root)
        runs = _run_without_fault(session, caches)
        if failed := [test for test, run in runs.items() if not run.passed]:
            raise session.Interrupted(f"these tests fail without any fault: {', '.join(failed)}")
        running: dict[int, Mutant] = {}
        for mutant in self._mutants:
            place = _Place(str(self._root / mutant.path), mutant.line)
            tests = [test for test in session.items if place in runs[test.nodeid].called]
            if not tests:
                self._report(mutant, Verdict.SURVIVED)
                continue
            tests.sort(key=lambda test: runs[test.nodeid].taken_s)
            if len(running) == self._num_jobs:
                self._finish_one(running)
            limits_s = [2 + math.ceil(2 * runs[test.nodeid].taken_s) for test in tests]
            code = _code(mutant, place)
            for cache in caches:
                cache.cache_clear()
            trial = _start(session, tests, limits_s, functions[place], code)
            running[trial] = mutant
        while running:
            self._finish_one(running)
        return True

    def _finish_one(self, running: dict[int, Mutant]) -> None:
        trial, status = os.wait()
        mutant, exit_code = running.pop(trial), os.waitstatus_to_exitcode(status)
        if exit_code == _BROKEN:
            raise RuntimeError(f"this mutant could not be tried:\n{mutant.diff()}")
        verdict = Verdict.KILLED if exit_code else Verdict.SURVIVED
        if exit_code == -signal.SIGXCPU:
            verdict = Verdict.TIMED_OUT
        self._report(mutant, verdict)


def _run_without_fault(
    session: pytest.Session, caches: Sequence["_lru_cache_wrapper[Any]"]
) -> dict[str, _Run]:
    """Run all tests, in a fork, so that the trials start from the state before.

    The caches are cleared before each test, because a cached function would not be called.

    Returns:
        Each test's run, by its ID.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        _silence()
        with os.fdopen(writer, "wb") as out:
            pickle.dump({test.nodeid: _note(session, test, caches) for test in session.items}, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as out:
        runs: dict[str, _Run] = pickle.load(out)
    os.wait()
    return runs


def _note(
    session: pytest.Session, test: pytest.Item, caches: Sequence["_lru_cache_wrapper[Any]"]
) -> _Run:
    """Run a test and note which functions it calls."""
    for cache in caches:
        cache.cache_clear()
    codes: dict[int, CodeType] = {}  # equal codes may be of two files

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes[id(frame.f_code)] = frame.f_code

    before_s = time.process_time()
    sys.setprofile(profile)
    passed = _passes(session, test)
    sys.setprofile(None)
    taken_s = time.process_time() - before_s
    called = {_Place(code.co_filename, code.co_firstlineno) for code in codes.values()}
    return _Run(passed, taken_s, called)


def _passes(session: pytest.Session, test: pytest.Item) -> bool:
    num_failed = session.testsfailed
    test.config.hook.pytest_runtest_protocol(item=test, nextitem=None)
    return session.testsfailed == num_failed


def _functions_in(root: Path) -> dict[_Place, list[FunctionType]]:
    """Return the imported functions of a tree. Decorators may have made copies of one."""
    functions = defaultdict(list)
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            code = function.__code__
            if code.co_filename.startswith(str(root)):
                functions[_Place(code.co_filename, code.co_firstlineno)].append(function)
    return functions


def _caches_in(root: Path) -> list["_lru_cache_wrapper[Any]"]:
    """Return the caches of a tree's functions."""
    return [
        cache
        for cache in gc.get_objects()
        if isinstance(cache, _lru_cache_wrapper)
        and isinstance(cache.__wrapped__, FunctionType)
        and cache.__wrapped__.__code__.co_filename.startswith(str(root))
    ]


def _code(mutant: Mutant, place: _Place) -> CodeType:
    """Compile a mutant, and return the code of the function in which it differs."""
    [code] = (
        code
        for code in _codes_of_functions(compile(mutant.after, place.file, "exec"))
        if code.co_firstlineno == place.line
    )
    return code


def _codes_of_functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of each function of a module or class, without functions in functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_function = constant.co_flags & inspect.CO_NEWLOCALS
            yield from [constant] if is_function else _codes_of_functions(constant)


def _start(
    session: pytest.Session,
    tests: Sequence[pytest.Item],
    limits_s: Sequence[int],
    functions: Sequence[FunctionType],
    code: CodeType,
) -> int:
    """Start a fork that gives the functions this code and runs the tests until one fails.

    Each test's limit is processor time, because other work may run on the machine.

    Returns:
        The fork's process ID. It exits with 1 if a test fails, and with `_BROKEN` after an error
        outside the tests.
    """
    if (trial := os.fork()) != 0:
        return trial
    try:
        _silence()
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        for function in functions:
            function.__code__ = code
        for test, limit_s in zip(tests, limits_s, strict=True):
            max_s = math.ceil(time.process_time()) + limit_s
            _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (max_s, most_s))
            if not _passes(session, test):
                os._exit(1)
        os._exit(0)
    finally:
        os._exit(_BROKEN)


def _silence() -> None:
    """Write what tests print, and their failures, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

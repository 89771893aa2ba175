"""Tries mutants: runs the tests on a copy of the tree with one fault in it.

Most faults are detected at once, so a trial's cost is mostly its start. Therefore each trial is a
fork of this process, which has imported the large libraries, and the copy is compiled.
"""

import compileall
import os
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from enum import Enum
from multiprocessing import get_context
from pathlib import Path
from py_compile import PycInvalidationMode

import hypothesis.stateful  # noqa: F401  (all of it, as numpy)
import numpy as np  # noqa: F401
import pytest

from tests.mutation.mutants import Mutant

_MAX_BYTES = 4 << 30
"""A mutant that hangs may fill lists."""


class Verdict(Enum):
    """The tests' verdict on a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"  # it hangs; this counts as detected
    SURVIVED = "survived"


class Trial:
    """A copy of a tree, and how to test it."""

    def __init__(
        self, root: Path, folders: Sequence[str], copy: Path, tests: Sequence[str]
    ) -> None:
        """Copy the folders of `root` that the tests need.

        `tests` are arguments of pytest; the tests that detect most faults soonest come first.
        """
        self.root = copy
        self._folders = frozenset(folders)
        self._output = copy / "output"
        self._tests = tests
        self._max_cpu_s = 600
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for folder in folders:
            shutil.copytree(root / folder, copy / folder, ignore=ignored)
            # Python compares only time and size, and could take another mutant's byte code
            by_hash = PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(copy / folder, quiet=1, invalidation_mode=by_hash)
        shutil.copy(root / "pyproject.toml", copy)

    def prove(self) -> float:
        """Check that the tests pass without a mutant; a mutant may take twice the time.

        Returns:
            How long they take, in seconds of one processor.

        Raises:
            RuntimeError: They do not pass.
        """
        before_s = _cpu_s_of_children()
        if self._run() != 0:
            raise RuntimeError(f"the tests fail without any mutant:\n{self._output.read_text()}")
        taken_s = _cpu_s_of_children() - before_s
        self._max_cpu_s = 5 + int(2 * taken_s)
        return taken_s

    def judge(self, mutant: Mutant) -> Verdict:
        """Test a mutant, and restore the file."""
        file = self.root / mutant.path
        file.write_text(mutant.after)
        try:
            exit_code = self._run()
        finally:
            file.write_text(mutant.before)
        if exit_code == -signal.SIGXCPU:
            return Verdict.TIMED_OUT
        return Verdict.KILLED if exit_code else Verdict.SURVIVED

    def _run(self) -> int:
        """Run the tests; return pytest's exit code, or minus the signal that ended it."""
        tests = get_context("fork").Process(target=self._test)
        tests.start()
        tests.join()
        return tests.exitcode

    def _test(self) -> None:
        """In the forked process: enter the copy, forget the tree's imported modules, run the
        tests."""
        # processor time, because other work may run on the machine
        resource.setrlimit(resource.RLIMIT_CPU, (self._max_cpu_s, self._max_cpu_s + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        with self._output.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(self.root)
        sys.path.insert(0, str(self.root))
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.partition(".")[0] in self._folders]:
            del sys.modules[name]
        # only whether it fails counts: no shrinking, no tracebacks
        options = "-x -q --tb=no --assert=plain -p no:randomly -p no:cacheprovider"
        profile = "--hypothesis-profile=mutation"
        os._exit(pytest.main([*options.split(), profile, *self._tests], [_ExamplesFirst()]))


class _ExamplesFirst:
    """Runs Hypothesis's tests last, because they take longer than all others together."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: hasattr(getattr(item, "obj", None), "hypothesis"))


def _cpu_s_of_children() -> float:
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.ru_utime + times.ru_stime

"""Tries mutants: a copy of the tree with one fault in it, and the tests that should see it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from tests.mutation.mutants import Mutant


class Verdict(Enum):
    """What the tests made of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"  # it hangs, which the tests would report as well
    SURVIVED = "survived"


class Trial:
    """A copy of a tree, and how to test it."""

    def __init__(self, copy: Path, tests: Sequence[str]) -> None:
        """`tests` are pytest's arguments; those that see most the soonest first."""
        self.root = copy
        self._tests = tests
        self._limit_s = 600.0

    @classmethod
    def of_tree(
        cls, root: Path, folders: Sequence[str], copy: Path, tests: Sequence[str]
    ) -> "Trial":
        """Copy what the tests need of the tree at `root`."""
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for folder in folders:
            shutil.copytree(root / folder, copy / folder, ignore=ignored)
        shutil.copy(root / "pyproject.toml", copy)
        return cls(copy, tests)

    def prove(self) -> float:
        """See that the tests pass as it is; a mutant may take four times as long.

        Returns:
            How long they take, in seconds.

        Raises:
            RuntimeError: They do not pass.
        """
        start = time.monotonic()
        result = self._run()
        if result.returncode != 0:
            raise RuntimeError(f"the tests fail without any mutant:\n{result.stdout}")
        taken_s = time.monotonic() - start
        self._limit_s = 10 + 4 * taken_s
        return taken_s

    def judge(self, mutant: Mutant) -> Verdict:
        """Test a mutant, and take it out again."""
        file = self.root / mutant.path
        file.write_text(mutant.after)
        try:
            failed = self._run().returncode != 0
        except subprocess.TimeoutExpired:
            return Verdict.TIMED_OUT
        finally:
            file.write_text(mutant.before)
        return Verdict.KILLED if failed else Verdict.SURVIVED

    def _run(self) -> subprocess.CompletedProcess[str]:
        # In the order given, and without shrinking: that it fails is all we want to know. A file of
        # byte code may be taken for that of another mutant of the same second and size.
        options = "-x -q --tb=no -p no:randomly -p no:cacheprovider --hypothesis-profile=mutation"
        return subprocess.run(
            [sys.executable, "-B", "-m", "pytest", *options.split(), *self._tests],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self._limit_s,
            check=False,
        )

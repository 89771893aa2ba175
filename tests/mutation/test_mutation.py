"""The mutation run distinguishes detected mutants from survivors."""

import os
import tomllib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.mutation.__main__ import all_mutants, candidates, equivalent_keys, key
from tests.mutation.mutants import mutants_of
from tests.mutation.trial import Verdict, try_mutants

SOURCE = """\
def count_up(limit: int) -> list[int]:
    \"\"\"Return what is below.\"\"\"
    assert limit > 0, "not this 1"
    numbers = []
    while len(numbers) < limit:
        numbers.append(len(numbers))
    return sorted(numbers)
"""
TEST = """\
from counting import count_up
def test_counting():
    assert count_up(2) == [0, 1]
"""


def expressions(statement):
    """Return the changed line of each mutant of a statement in a function."""
    found = mutants_of(Path("a.py"), f"def f():\n    {statement}\n")
    return [mutant.added for mutant in found]


def verdicts(root):
    """Return the verdict on each mutant of the code in `root`, by its changed line."""
    os.chdir(root)
    found = {}
    path = Path("src/counting.py")
    mutants = list(mutants_of(path, path.read_text()))
    exit_code = try_mutants(
        root, mutants, ["t"], 2, lambda mutant, verdict: found.update({mutant.added: verdict})
    )
    return exit_code, found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["pass", "(a <= b)"]),
        ("x = f(a, b) is not c", ["x = (f(a, b) is c)", "x = (f(b, a)) is not c"]),
        ("x = -1", ["x = (1)", "x = -(2)"]),
        ("x = a and not b", ["x = (a or not b)", "x = (a)", "x = (not b)", "x = a and (b)"]),
        ("x = y[1:]", ["x = (y[:])", "x = y[(2):]"]),
        ("x = [y for y in z if y]", ["x = ([y for y in z])"]),
        ("x = reversed(q.popleft())", ["x = (q.popleft())", "x = reversed((q.pop()))"]),
        ("x = zip(a, strict=True)", []),
        ("x = f(a, a)", []),
        ("self.x = True", ["pass", "self.x = (False)"]),
        ("if a: raise E('ü' + 'b')", ["if (not (a)): raise E('ü' + 'b')", "if a: pass"]),
        ("é: int = 1 + 'ü'", ["é: int = (1 - 'ü')", "é: int = (2) + 'ü'"]),
    ],
)
def test_slips_of_the_hand(source, expected):
    assert expressions(source) == expected


def write_tree(root, source, test):
    for folder, name, text in (("src", "counting.py", source), ("t", "test_it.py", test)):
        (root / folder).mkdir()
        (root / folder / name).write_text(text)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = 'src'\n")
    (root / "t" / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('mutation')\n"
    )


def in_a_process_of_its_own(function, *args):
    """Call a function there: a fork of a process with gRPC's threads sometimes hangs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as clean:
        return clean.submit(function, *args).result()


def test_a_mutant_that_the_tests_do_not_see_survives(tmp_path):
    write_tree(tmp_path, SOURCE, TEST)
    assert in_a_process_of_its_own(verdicts, tmp_path) == (
        0,
        {
            "while (not (len(numbers) < limit)):": Verdict.KILLED,
            "while (len(numbers) <= limit):": Verdict.KILLED,
            "pass": Verdict.TIMED_OUT,
            "return (numbers)": Verdict.SURVIVED,
        },
    )


def test_a_mutant_that_cannot_be_tried_is_no_detected_one(tmp_path):
    write_tree(
        tmp_path,
        """\
class Base:
    def f(self):
        pass
class Counter(Base):
    def count(self):
        super().f()
        return 1
""",
        """\
from counting import Counter
def test_counting():
    assert Counter().count()
""",
    )
    # without super(), the function has another closure
    assert in_a_process_of_its_own(verdicts, tmp_path)[0] == pytest.ExitCode.INTERNAL_ERROR


def test_a_test_that_finds_a_function_s_result_in_a_cache_is_run_too(tmp_path):
    write_tree(
        tmp_path,
        """\
from functools import lru_cache
@lru_cache
def one():
    return 1
""",
        """\
from counting import one
def test_it_exists():
    one()
def test_one():
    assert one() == 1
""",
    )
    assert in_a_process_of_its_own(verdicts, tmp_path) == (0, {"return (2)": Verdict.KILLED})


def test_what_is_listed_as_no_fault_is_not_drawn(monkeypatch):
    drawn = candidates()
    assert len(drawn) > 500
    one = drawn[0]
    entry = dict(zip(("at", "old", "new"), key(one), strict=True))
    monkeypatch.setattr(tomllib, "loads", lambda _: {"mutant": [entry]})
    assert one not in candidates()


def test_each_listed_mutant_exists():
    assert equivalent_keys() <= set(map(key, all_mutants()))

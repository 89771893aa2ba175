"""Every case of the corpus, and a few hundred drawn cases, the same in each run."""

import contextlib

import pytest
from hypothesis import strategies as st

from quire.v1 import common_pb2
from tests.fuzz import fuzzing
from tests.fuzz.__main__ import TARGETS
from tests.fuzz.fuzzing import (
    Target,
    long_pass,
    read_case,
    replay_corpus,
    short_pass,
    write_case,
)


@pytest.mark.parametrize("name", TARGETS)
def test_cases_of_the_corpus_are_answered_well(name):
    replay_corpus(TARGETS[name])


@pytest.mark.parametrize("name", TARGETS)
def test_drawn_cases_are_answered_well(name):
    short_pass(TARGETS[name])


# --- the fuzzer itself --------------------------------------------------------------------------


def _stumbles(case):
    assert sum(map(len, case)) < 3, "more than two bytes"


STUMBLING = Target(
    "stumbling",
    st.lists(st.binary(max_size=8), max_size=3).map(tuple),
    lambda: contextlib.nullcontext(_stumbles),
)


def test_a_short_pass_fails_for_what_a_check_raises():
    with pytest.raises(AssertionError, match="more than two bytes"):
        short_pass(STUMBLING)


def test_a_long_pass_gives_the_smallest_bad_case_and_why():
    num_cases, found = long_pass(STUMBLING, until=float("inf"), seed=1)
    assert found is not None
    assert found.case == (b"\0\0\0",)
    assert "more than two bytes" in str(found.error)
    assert num_cases > 0


def test_a_long_pass_ends_with_its_time():
    assert long_pass(STUMBLING, until=0.0, seed=1) == (0, None)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (None, (b"a\nb'\"\xff", b"")),
        (common_pb2.Load, (common_pb2.Load(num_blocks=3).SerializeToString(), b"", b"\x0a\xff")),
        (common_pb2.Load, (b"\x08\x80\x00",)),  # a message, but not as we write it
    ],
)
def test_a_case_is_read_as_it_was_written(kind, case, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "CORPUS", tmp_path)
    target = Target("written", st.just(case), STUMBLING.open, kind)
    path = write_case(target, case, "why\nand é more")
    assert target.paths() == [path]
    assert read_case(path, kind) == case


def test_a_bad_case_of_the_corpus_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "CORPUS", tmp_path)
    path = write_case(STUMBLING, (b"abc",), "")
    with pytest.raises(AssertionError) as caught:
        replay_corpus(STUMBLING)
    assert str(path) in caught.value.__notes__[0]


def test_every_folder_of_the_corpus_is_a_targets():
    assert {path.name for path in fuzzing.CORPUS.iterdir()} <= set(TARGETS)

"""Every case that was ever bad, and a few hundred that are drawn: the same in each run."""

import contextlib

import pytest
from hypothesis import strategies as st

from tests.fuzz.corpus import read_case, write_case
from tests.fuzz.hunt import short_pass, try_corpus
from tests.fuzz.registry import TARGETS
from tests.fuzz.target import Target


@pytest.mark.parametrize("name", TARGETS)
def test_cases_of_the_corpus_are_answered_well(name):
    try_corpus(TARGETS[name])


@pytest.mark.parametrize("name", TARGETS)
def test_drawn_cases_are_answered_well(name):
    short_pass(TARGETS[name])

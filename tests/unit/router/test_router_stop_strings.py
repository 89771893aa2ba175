"""The stop string matcher equals a search of the whole text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.live.stop_strings import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def matcher(stops, *, include=False):
    return StopMatcher(stops, include_in_output=include)


def first_stop(text, stops):
    """The end of the stop string that completes first, and the string (the longest of several)."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return None
    end, _, stop = min(ends)
    return end, stop


@given(STOPS, st.lists(st.text("abc", max_size=6), max_size=12), st.booleans())
def test_pieces_give_what_str_find_gives_for_the_whole_text(stops, chunks, include):
    text = "".join(chunks)
    watch = matcher(stops, include=include)
    shown = ""
    for chunk in chunks:
        shown += watch.push(chunk)
        if watch.found is not None:
            break
    shown += watch.flush()
    if (expected := first_stop(text, stops)) is None:
        assert watch.found is None
        assert shown == text
    else:
        end, stop = expected
        assert watch.found == stop
        assert shown == text[: end if include else end - len(stop)]


@given(STOPS, st.text("abc", max_size=40))
def test_held_back_is_exactly_the_longest_end_that_a_stop_string_begins_with(stops, text):
    watch = matcher(stops)
    shown = ""
    for i, character in enumerate(text):
        shown += watch.push(character)
        if watch.found is not None:
            return
        seen = text[: i + 1]
        longest = max(k for s in stops for k in range(len(s)) if seen.endswith(s[:k]))
        assert shown == seen[: len(seen) - longest]


def test_no_stop_strings_hold_nothing_back():
    watch = matcher([])
    assert watch.push("anything") == "anything"
    assert watch.found is None


def test_the_rest_of_the_piece_after_a_stop_string_is_dropped():
    watch = matcher(["\n\n"])
    assert watch.push("one\n") == "one"
    assert watch.push("\ntwo") == ""
    assert (watch.found, watch.flush()) == ("\n\n", "")


@pytest.mark.parametrize("chunk_chars", [1, 4096])
def test_the_worst_case_is_linear(chunk_chars):
    # 16 strings of 1,024 characters, different only at the end, and a text that completes none. A
    # search that starts again at each character would compare 16 · 1,024 characters each time.
    stops = ["a" * 1023 + chr(ord("b") + i) for i in range(16)]
    text = "a" * 20_000
    watch = matcher(stops)
    start = time.process_time()
    shown = sum(
        len(watch.push(text[i : i + chunk_chars])) for i in range(0, len(text), chunk_chars)
    )
    assert shown == len(text) - 1023
    assert time.process_time() - start < 5.0  # 0.3 s here; quadratic is minutes


class Counted(str):  # noqa: SLOT000
    """A stop string that counts how often text is compared with its beginning."""

    num_comparisons = 0

    def startswith(self, *args):
        self.num_comparisons += 1
        return super().startswith(*args)


@given(
    st.lists(st.text("ab", min_size=1, max_size=60), min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=40), max_size=40),
)
def test_each_character_is_compared_with_a_beginning_at_most_twice(stops, chunks):
    stops = [Counted(stop) for stop in stops]
    watch = matcher(stops)
    for num_pieces, chunk in enumerate(chunks, 1):
        watch.push(chunk)
        if watch.found is not None:
            return
        num_chars = sum(map(len, chunks[:num_pieces]))
        # A failed comparison rules out a character for all later ones; each piece has one that
        # succeeds.
        assert all(stop.num_comparisons <= num_chars + num_pieces for stop in stops)

"""Models' outputs, mutated and cut anywhere: each split reads alike, and nothing is swallowed."""

import contextlib
import re
from itertools import pairwise

from hypothesis import strategies as st

from router.parsers.families import THINKING_FAMILIES, TOOL_FAMILIES
from tests.fuzz.fuzzing import Case, Check, Target
from tests.reading import EXAMPLES, Read, new_reader, read

MARK = "π"
"""A character of no syntax: each that goes in must come out."""
_PART = re.compile(r"<[^<>]*>|\[[A-Z_]*\]|```|\\.|\w+|\s+|[^\w\s]")
_THOUGHTS = ("", "<think>a b</think>\n", "<think>", "[THINK]c[/THINK]", "</think>")
_PARTS = sorted(
    {
        part
        for examples in EXAMPLES.values()
        for example in examples
        for part in _PART.findall(example)
    }
    | {*_THOUGHTS, MARK, "\\", "\\u00", "'", "é", "null", "True", "-", "1e"}
)
_FAMILIES = sorted(TOOL_FAMILIES)
_THINKING = ["", *THINKING_FAMILIES]


@st.composite
def _outputs(draw: st.DrawFn) -> Case:
    """A family, its thinking, an output with some parts replaced, and where to cut it."""
    family = draw(st.sampled_from(_FAMILIES))
    thinking = draw(st.sampled_from(_THINKING)) + draw(st.sampled_from(("", "!")))
    text = draw(st.sampled_from(_THOUGHTS)) + draw(st.sampled_from(EXAMPLES[family]))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 16)))
        text = text[:start] + draw(st.sampled_from(_PARTS)) + text[end:]
    cuts = draw(st.lists(st.integers(0, 255), max_size=6))
    return family.encode(), thinking.encode(), text.encode(), bytes(cuts)


def check_output(case: Case) -> None:
    """Read an output at once, in its pieces, and cut short."""
    family, thinking, text, cuts = case[0].decode(), case[1].decode(), case[2].decode(), case[3]

    def made(pieces: list[str]) -> Read:
        reader = new_reader(family, thinking.removesuffix("!"), has_begun=thinking.endswith("!"))
        return read(reader, pieces)

    whole = made([text])
    places = sorted({len(text) * cut // 255 for cut in cuts} | {0, len(text)})
    split = made([text[a:b] for a, b in pairwise(places)])
    assert split.events == whole.events, f"{split.events} is not {whole.events}"
    shown = sum(part.count(MARK) for event in whole.events for part in event)
    in_ids = sum(
        call_id.count(MARK) - event[1].count(MARK)
        for call_id, event in zip(
            whole.ids, [event for event in whole.events if event[0] == "call"], strict=True
        )
        if MARK in call_id
    )
    assert shown + in_ids == text.count(MARK), f"something is lost or doubled: {whole.events}"
    made([text[: places[len(places) // 2]]])


def _check(case: Case) -> None:
    if case[0].decode() in TOOL_FAMILIES and len(case) == len((b"family", b"", b"", b"")):
        check_output(case)


def _open() -> contextlib.AbstractContextManager[Check]:
    return contextlib.nullcontext(_check)


TARGETS = (Target("outputs", _outputs(), _open, num_examples=400),)

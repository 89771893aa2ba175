"""Mutated model outputs, cut anywhere: each split reads the same, and no character is lost."""

import contextlib
import random
import re
from itertools import pairwise

from hypothesis import strategies as st

from router.parsers.families import THINKING_FAMILIES, TOOL_FAMILIES
from tests.fuzz.fuzzing import Case, Check, Target
from tests.reading import EXAMPLES, Read, new_reader, read

OUTPUTS_OF_A_SEED = 1000
MARK = "π"
"""A character that no syntax uses: it must come out as often as it goes in."""
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


def drawn(rng: random.Random) -> Case:
    """A family, its thinking, an output with some parts replaced, and where to cut it."""
    family = rng.choice(_FAMILIES)
    thinking = rng.choice(_THINKING) + rng.choice(("", "!"))
    text = rng.choice(_THOUGHTS) + rng.choice(EXAMPLES[family])
    for _ in range(rng.randrange(5)):
        start = rng.randrange(len(text) + 1)
        text = text[:start] + rng.choice(_PARTS) + text[start + rng.choice((0, 0, 1, 2, 5, 16)) :]
    return family.encode(), thinking.encode(), text.encode(), rng.randbytes(rng.choice((1, 2, 6)))


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
    """Check an output, or many that are drawn from a seed, because one is quick."""
    if len(case) > 1:
        check_output(case)
        return
    rng = random.Random(case[0])
    for _ in range(OUTPUTS_OF_A_SEED):
        output = drawn(rng)
        try:
            check_output(output)
        except Exception as error:
            error.add_note(f"output {output}")
            raise


def _open() -> contextlib.AbstractContextManager[Check]:
    return contextlib.nullcontext(_check)


TARGETS = (Target("outputs", st.tuples(st.binary(min_size=8, max_size=8)), _open, num_examples=10),)

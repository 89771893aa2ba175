"""Tool calls and content are parsed from an output's text, however it is cut into pieces."""

import json

import pytest

from router.http.responses.tool_calls import CallReader, ChosenCall, ForcedCall, TaggedCalls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ("add", {"a": 1, "b": "é"})


def read(reader: CallReader, pieces: list[str]):
    readings = [*map(reader.push, pieces), reader.flush()]
    calls: dict[int, list] = {}
    for piece in (piece for reading in readings for piece in reading.calls):
        if piece.call_id is not None:
            assert piece.position not in calls
            calls[piece.position] = [piece.name, ""]
        calls[piece.position][1] += piece.arguments
    assert list(calls) == list(range(len(calls)))
    return (
        "".join(reading.content for reading in readings),
        [(name, json.loads(arguments)) for name, arguments in calls.values()],
    )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("Hi there.\n", "Hi there.\n", []),
        ("1 < 2, <tool>, <tool_cal", "1 < 2, <tool>, <tool_cal", []),
        (CALL, "", [ADD]),
        (f"\n\n{CALL}\n{CALL}\n", "", [ADD, ADD]),
        (f"Let me see.\n{CALL}", "Let me see.", [ADD]),
        (f"{CALL}\nDone.", "\nDone.", [ADD]),
        (CALL.removesuffix("</tool_call>"), "", [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ("<tool_call>{add}</tool_call>!", "<tool_call>{add}</tool_call>!", []),
        ('<tool_call>["add"]</tool_call>', '<tool_call>["add"]</tool_call>', []),
        (
            '<tool_call>{"name": "add", "arguments": "1"}',
            '<tool_call>{"name": "add", "arguments": "1"}',
            [],
        ),
        ('<tool_call>{"name": 3}</tool_call>' + CALL, '<tool_call>{"name": 3}</tool_call>', [ADD]),
    ],
)
def test_calls_between_tags(text, content, calls):
    assert read(TaggedCalls(), [text]) == (content, calls)
    assert read(TaggedCalls(), list(text)) == (content, calls)
    for cut in range(len(text)):
        assert read(TaggedCalls(), [text[:cut], text[cut:]]) == (content, calls)


def test_content_is_not_held_back_longer_than_it_may_be_a_tag():
    reader = TaggedCalls()
    assert [reader.push(piece).content for piece in ("a ", "<too", "th>", " b")] == [
        "a",
        "",
        " <tooth>",
        " b",
    ]


def test_a_forced_call_passes_its_arguments_on_as_they_come():
    reader = ForcedCall("add")
    first, second = reader.push('{"a":'), reader.push(" 1}")
    assert (first.calls[0].name, first.calls[0].arguments) == ("add", '{"a":')
    assert first.calls[0].call_id
    (rest,) = second.calls
    assert (rest.position, rest.arguments, rest.call_id, rest.name) == (0, " 1}", None, None)
    assert read(ForcedCall("add"), ['{"a": 1}', ""]) == ("", [("add", {"a": 1})])


def test_a_chosen_call_is_content_if_it_was_cut_short():
    text = '{"name": "add", "arguments": {"a": 1}}'
    assert read(ChosenCall(), list(text)) == ("", [("add", {"a": 1})])
    assert read(ChosenCall(), list(text[:-1])) == (text[:-1], [])

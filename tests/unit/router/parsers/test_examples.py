"""Published examples of each family, whole and in every split."""

import pytest

from router.parsers.families import TOOL_FAMILIES
from tests.reading import EXAMPLES, new_reader, read

SYDNEY = ("get_weather", {"city": "Sydney", "tags": ["now", "day"]})
FOUND = {
    "hermes": [
        ("", [("get_weather", {"city": "Paris", "days": 2})]),
        ("Let me see.", [("add", {"a": 1}), ("add", {"a": 2})]),
        ("", [("get_weather", {"city": "Köln", "tags": [], "unit": None})]),
        ("Both.", [("add", {"a": 1}), ("get_weather", {"city": 'a "</tool_call>" b'})]),
    ],
    "qwen3_coder": [
        ("I'll look.", [("get_weather", {"city": "New York", "days": 3})]),
        ("", [("get_weather", {"tags": ["a", {"b": 1}]}), ("add", {})]),
        ("", [("get_weather", {"city": "if a < b:\n    c = '</p>'\n", "unit": None})]),
        ("Now.", [("add", {"a": -7})]),
    ],
    "llama3_json": [
        ("", [("get_weather", {"city": "San Francisco"})]),
        ("", [("add", {"a": 1}), ("add", {"a": 2})]),
        ("", [("get_weather", {"city": "Paris", "days": 1})]),
        ("", [("add", {"a": 2})]),
    ],
    "pythonic": [
        ("", [("get_weather", {"city": "San Francisco", "days": 3}), ("add", {"a": -1})]),
        ("", [("get_weather", {"tags": ["a", True, None, {"b": 1.5}]})]),
        (
            "",
            [
                ("get_weather", {"city": "San Francisco"}),
                ("get_weather", {"city": "Seattle", "unit": None}),
            ],
        ),
        (
            "",
            [
                ("add", {"a": 1}),
                ("get_weather", {"city": "Saint-Denis", "tags": ["l'île", -500.0]}),
            ],
        ),
    ],
    "mistral": [
        ("", [("add", {"a": 3}), ("get_weather", {"city": "Oslo"})]),
        ("Sure.", [("get_weather", {"city": "Paris"}), ("add", {"a": 3})]),
        ("", [("get_weather", {"city": "Paris", "days": 2})]),
        ("", [("add", {"a": 1})]),
    ],
    "mistral_v11": [
        ("", [("get_weather", {"city": "Paris"}), ("add", {"a": 3})]),
        ("I add.", [("add", {"a": [1, {"b": "]"}]})]),
    ],
    "mistral_v13": [
        ("Let me look.", [("get_weather", {"city": "Paris"}), ("add", {"a": 3})]),
        ("", [("get_weather", {"city": "a\nb", "tags": []})]),
    ],
    "deepseek_v3": [
        ("", [("get_weather", {"city": "Tokyo"}), ("add", {"a": 1})]),
        ("I look.", [("get_weather", {"city": "Hangzhou", "tags": ["```"]})]),
    ],
    "deepseek_v31": [
        ("Well.", [("get_weather", {"city": "Tokyo"}), ("add", {"a": 1})]),
        ("", [("get_weather", {"city": "Hangzhou", "unit": None})]),
    ],
    "glm45": [
        ("I check.", [("get_weather", {"city": "Beijing", "days": 5}), ("add", {"a": 1})]),
        ("", [("get_weather", {"city": "a < b\n c", "tags": [1, True], "unit": "celsius"})]),
    ],
    "kimi_k2": [
        ("I'll check.", [("get_weather", {"city": "Beijing"}), ("add", {"a": 1})]),
        ("", [("get_weather", {"city": "Beijing", "tags": ["<|tool"]})]),
    ],
    "minimax": [
        ("", [("get_weather", {"city": "Shanghai"}), ("add", {"a": 1})]),
        ("I need it.", [("get_weather", {"city": "San Francisco", "days": 3, "tags": ["a"]})]),
    ],
    "minimax_m2": [
        ("Let me.", [SYDNEY, ("add", {"a": 1})]),
        ("", [("get_weather", {"city": 'a "<b>"\nc', "days": 2})]),
    ],
    "harmony": [
        ("", [("get_weather", {"city": "San Francisco"})]),
        ("", [("add", {"a": 1})]),
        ("It is 20 °C.", []),
        ("I look.", [("add", {"a": {"b": ["<|end"]}})]),
    ],
}


def test_every_family_has_examples():
    assert EXAMPLES.keys() == TOOL_FAMILIES.keys() == FOUND.keys()


@pytest.mark.parametrize("family", FOUND)
def test_a_published_example_is_read_alike_whole_and_in_every_split(family):
    for output, (text, calls) in zip(EXAMPLES[family], FOUND[family], strict=True):
        whole = read(new_reader(family), [output])
        assert (whole.text, whole.calls) == (text, calls)
        assert read(new_reader(family), list(output)).events == whole.events
        for cut in range(len(output)):
            pieces = [output[:cut], output[cut:]]
            assert read(new_reader(family), pieces).events == whole.events, cut


@pytest.mark.parametrize("family", FOUND)
def test_a_calls_arguments_are_shown_as_they_come(family):
    for output in EXAMPLES[family]:
        reader, shown = new_reader(family), []
        for character in output:
            shown += [p for p in reader.push(character) if getattr(p, "arguments", "")]
        num_calls = len(read(new_reader(family), [output]).calls)
        assert len(shown) >= 4 * num_calls - 3, "each is several pieces"


def test_ids_are_those_that_the_family_demands():
    assert read(new_reader("kimi_k2"), EXAMPLES["kimi_k2"][:1]).ids == [
        "functions.get_weather:0",
        "functions.add:1",
    ]
    assert read(new_reader("mistral_v11"), EXAMPLES["mistral_v11"][:1]).ids == [
        "D681PevKs",
        "9aFgK2dLx",
    ]
    for call_id in read(new_reader("mistral"), EXAMPLES["mistral"][:1]).ids:
        assert call_id.isalnum()
        assert len(call_id) == 9


THOUGHT = [
    ("think", "<think>\nHm.\n</think>\n\nHi!", "Hm.", "Hi!"),
    ("think", "  Hi <think>!", "", "  Hi <think>!"),
    ("think", "<think>cut", "cut", ""),
    ("think", "<think></think>Hi", "", "Hi"),
    ("mistral", "[THINK]Hm.[/THINK]Hi", "Hm.", "Hi"),
    ("kimi_vl", "◁think▷Hm.◁/think▷Hi", "Hm.", "Hi"),
    ("seed", "<seed:think>Hm.</seed:think>Hi", "Hm.", "Hi"),
]


@pytest.mark.parametrize(("thinking", "output", "thought", "text"), THOUGHT)
def test_thinking_is_told_from_text(thinking, output, thought, text):
    for pieces in ([output], output):
        found = read(new_reader("hermes", thinking), pieces)
        assert (found.thought, found.text) == (thought, text)


def test_thinking_that_the_prompt_has_begun_needs_no_marker():
    for output in ("Hm.</think>Hi", "<think>Hm.</think>Hi"):
        found = read(new_reader("hermes", "think", has_begun=True), output)
        assert (found.thought, found.text) == ("Hm.", "Hi")


def test_a_call_ends_thinking_where_the_family_says_so():
    output = "<think>Hm. " + EXAMPLES["kimi_k2"][0].removeprefix("I'll check. ")
    found = read(new_reader("kimi_k2", "kimi_k2"), output)
    assert (found.thought, [name for name, _ in found.calls]) == ("Hm.", ["get_weather", "add"])

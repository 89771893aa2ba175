"""The choice of parsers by chat template or setting."""

import pytest

from router.parsers.choosing import OutputParsers, ParserError, choose_parsers
from router.parsers.families import THINKING_FAMILIES, TOOL_FAMILIES
from router.parsers.pieces import Text, Thought
from router.parsers.thinking import Thinking
from tests.reading import read

MINE = Thinking("<mine>", "</mine>")


class Shouting:
    """A reader that a user has written."""

    def __init__(self, tools):
        self.tools = tools

    def push(self, text):
        return [Text(text.upper())]

    def flush(self):
        return [Text(f"{len(self.tools)}!")]


class Halved:
    """A reader of thinking that a user has written: it ends with a semicolon."""

    def __init__(self, prompt_end):
        self.is_thinking = prompt_end.endswith("think:")

    def push(self, text):
        thought, end, said = text.partition(";") if self.is_thinking else ("", ";", text)
        self.is_thinking = not end
        return [*filter(None, [thought and Thought(thought), said and Text(said)])]

    def flush(self):
        return []


# Extracts of these models' templates.
TEMPLATES = [
    ('<tool_call>\n{"name": <function-name>}</tool_call> <think></think>', "hermes", "think"),
    ("<tool_call><function=x><parameter=y>", "qwen3_coder", ""),
    ('{"name": function name, "parameters": dictionary}', "llama3_json", ""),
    ("<|python_tag|>[func_name1(params_name1=1)]", "pythonic", ""),
    ("[TOOL_CALLS] [THINK][/THINK]", "mistral", "mistral"),
    ("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]", "mistral_v11", ""),
    ("[TOOL_CALLS]{{ name }}[ARGS] [THINK][/THINK]", "mistral_v13", "mistral"),
    ("<｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", "think"),
    ("<｜tool▁calls▁begin｜></think>", "deepseek_v31", "think"),
    ("<tool_call><arg_key></think>", "glm45", "think"),
    ("<|tool_calls_section_begin|></think>", "kimi_k2", "kimi_k2"),
    ("<tool_calls>", "minimax", ""),
    ("<minimax:tool_call></think>", "minimax_m2", "think"),
    ("<|channel|><|message|>", "harmony", ""),
    ("◁/think▷", "", "kimi_vl"),
    ("<seed:think></seed:think>", "", "seed"),
    ("<tool_call><function=x>{}</function>", "", ""),
    ("{{ messages }}", "", ""),
]


@pytest.mark.parametrize(("template", "tools", "thinking"), TEMPLATES)
def test_a_templates_markers_choose(template, tools, thinking):
    assert choose_parsers(template, "", "") == (
        TOOL_FAMILIES.get(tools),
        THINKING_FAMILIES.get(thinking),
    )


def test_settings_choose():
    template = TEMPLATES[0][0]
    assert choose_parsers(template, "none", "none") == (None, None)
    assert choose_parsers(template, "mistral", "kimi_vl") == (
        TOOL_FAMILIES["mistral"],
        THINKING_FAMILIES["kimi_vl"],
    )


def test_a_class_of_ones_own_reads_what_follows_thinking():
    tools, thinking = choose_parsers("", f"{__name__}:Shouting", f"{__name__}:MINE")
    parsers = OutputParsers(tools, thinking, lambda _: None, lambda _: False)
    found = read(parsers.new_reader({"f": {}}, has_begun=False), "<mine>hm</mine>hi")
    assert (found.thought, found.text) == ("hm", "HI1!")


def test_a_class_of_ones_own_may_read_thinking():
    tools, thinking = choose_parsers(TEMPLATES[0][0], "", f"{__name__}:Halved")
    parsers = OutputParsers(tools, thinking, lambda _: None, lambda _: False)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for prompt, thought, text in (("think:", "hm", "Hi"), ("", "", "hm;Hi")):
        for pieces in ([f"hm;Hi{call}"], f"hm;Hi{call}"):
            reader = parsers.new_reader({"f": {}}, has_begun=False, prompt_end=prompt)
            found = read(reader, pieces)
            assert (found.thought, found.text, found.calls) == (thought, text, [("f", {})])
    assert (parsers.thinking_family, parsers.markers(has_begun=False)) == (None, None)


@pytest.mark.parametrize(
    ("tools", "thinking", "problem"),
    [
        ("hermez", "", "tool_parser is 'hermez'; it must be none, one of harmony"),
        ("no.such:Class", "", "tool_parser is 'no.such:Class', which cannot be imported"),
        ("json:JSONDecode", "", "cannot be imported"),
        ("json:loads", "", "it must be a ToolFamily or type"),
        ("", "json:loads", "it must be a Thinking or type"),
    ],
)
def test_a_setting_that_names_no_parser_is_refused(tools, thinking, problem):
    with pytest.raises(ParserError, match=problem):
        choose_parsers("", tools, thinking)

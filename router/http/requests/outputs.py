"""Plans a chat's outputs: thinking and its budget, tool calls, structured output."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from pydantic_core import from_json

from contract.errors import InvalidArgumentError, UnimplementedError
from contract.request import GenerateRequest, ThinkingMarkers
from contract.sampling import StructuredOutput
from router.http.requests.chat_words import ChatWords
from router.http.requests.tools import Function, ToolUse
from router.parsers.call_grammar import (
    CallGrammar,
    ForcedFunction,
    ThinkingGrammar,
    inline_json,
    thinking_grammar,
)
from router.parsers.choosing import OutputParsers
from router.parsers.forced import ForcedCall, chosen_call
from router.parsers.harmony import begun_channel
from router.parsers.harmony_grammar import MessageGrammar, message_grammar
from router.parsers.pieces import Reader
from router.parsers.tool_calls import Tools
from router.text.structured_output import check_refs

_PROMPT_END_CHARS: Final = 256
"""A user's own class that reads thinking gets this many of the prompt's last characters."""

Thought: TypeAlias = ThinkingGrammar | MessageGrammar
"""The grammar of the thinking before an answer."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The constraints on a chat's outputs, and the readers that parse these outputs."""

    new_reader: Callable[[], Reader] | None = None
    """Makes the reader of one output; None: the whole output is text."""
    structured: StructuredOutput | None = None
    before_form: str = ""
    stop: tuple[str, ...] = ()
    """Stop strings that end a tool call, in addition to the client's."""
    shows_special_tokens: bool = False
    thinking: ThinkingMarkers | None = None
    field_to_json: Mapping[str, str] = field(default_factory=dict)

    def applied_to(self, request: GenerateRequest) -> GenerateRequest:
        return replace(
            request,
            sampling=replace(request.sampling, structured=self.structured),
            before_form=self.before_form,
            stop=request.stop + self.stop,
            skip_special_tokens=request.skip_special_tokens and not self.shows_special_tokens,
            thinking=self.thinking,
        )


def plan_outputs(
    parsers: OutputParsers,
    tools: ToolUse | None,
    form: StructuredOutput | None,
    *,
    prompt: str,
    continued: str,
    thinking_budget: int | None,
    words: ChatWords,
) -> OutputPlan:
    """Plan the outputs of a chat whose template has made `prompt`.

    `continued` is the assistant's message at the prompt's end, if outputs continue it.

    Raises:
        InvalidArgumentError: The schema of the output or of a function is invalid.
        UnimplementedError: The model's syntax for thinking or calls does not support the request.
    """
    thinking, channel = parsers.thinking_family, ""
    if thinking is not None:
        has_begun = thinking.has_begun(prompt, continued)
    else:
        channel = begun_channel(prompt) if parsers.reads_messages else ""
        has_begun = bool(channel)
    thought: Thought | None = None
    if parsers.reads_messages:
        thought = message_grammar(parsers.token_id, channel, thinking_budget)
    elif thinking is not None:
        thought = thinking_grammar(
            thinking, parsers.token_id, has_begun=has_begun, max_tokens=thinking_budget
        )
    if thinking_budget is not None and thought is None:
        is_known = thinking is not None or parsers.reads_messages
        raise UnimplementedError(
            f"{words.thinking} is set; with this model it must be unset: "
            + (
                "the markers of its thinking are not tokens"
                if is_known
                else "no parser for its thinking is known"
            )
        )
    new_reader = functools.partial(
        parsers.new_reader, has_begun=has_begun, prompt_end=prompt[-_PROMPT_END_CHARS:]
    )
    if tools is not None and tools.wants_calls:
        plan = _plan_calls(parsers, tools, form, thought, new_reader, words)
    else:
        plan = _plan_text(parsers, form, thought, new_reader, words)
    return replace(plan, thinking=parsers.markers(has_begun=has_begun))


def _plan_text(
    parsers: OutputParsers,
    form: StructuredOutput | None,
    thought: Thought | None,
    new_reader: Callable[[Tools | None], Reader],
    words: ChatWords,
) -> OutputPlan:
    is_read = parsers.thinking is not None or parsers.reads_messages
    before = "" if thought is None else thought.before("form")
    if form is not None and not before:  # the whole output must have the form
        return OutputPlan(structured=form)
    plan = OutputPlan(
        (lambda: new_reader(None)) if is_read else None,
        form,
        before if form is not None else "",
        shows_special_tokens=is_read and parsers.hides_markers(),
    )
    return plan if form is not None else _bounded(plan, thought, words)


def _plan_calls(
    parsers: OutputParsers,
    tools: ToolUse,
    form: StructuredOutput | None,
    thought: Thought | None,
    new_reader: Callable[..., Reader],
    words: ChatWords,
) -> OutputPlan:
    """Plan outputs that may call functions.

    `form` is the structured output that the client asks for. It is ignored if a call is forced.
    """
    written = None if parsers.family is None else parsers.family.written
    if tools.is_forced and written is None:
        return _plain_json(tools.functions)
    if thought is None and (tools.is_forced or form is not None):  # no thinking is possible
        new_reader = functools.partial(new_reader, has_begun=False, prompt_end="")
    schemas = {function.name: function.schema_of_arguments() for function in tools.offered}
    plan = OutputPlan(
        lambda: new_reader(schemas),
        shows_special_tokens=parsers.hides_markers(),
        field_to_json={"structured.grammar": "tools"},
    )
    functions = [
        ForcedFunction(function.name, function.schema_of_arguments())
        for function in tools.functions
    ]
    grammar = None if written is None else CallGrammar(written, parsers.token_id)
    if tools.is_forced and grammar is not None:
        calls = grammar.calls(_checked(functions), may_be_several=not tools.is_alone)
        return _formed(plan, calls, "" if thought is None else thought.before("call"))
    before = "" if thought is None else thought.before("text")
    if form is not None:
        if grammar is None:
            raise UnimplementedError(
                f'{words.choice} is "auto" and the output has a form; with this model it must be'
                f' "none", {words.forced} or name a function, because the grammar of its calls is'
                " unknown"
            )
        either = grammar.calls_or_form(
            _checked(functions),
            _inline(form, words),
            thought,
            may_be_several=not tools.is_alone,
        )
        return _formed(plan, either, before)
    stop = "" if parsers.family is None else parsers.family.stop
    if tools.is_alone and stop:
        plan = replace(plan, stop=(stop,))
    strict = [i for i, function in enumerate(tools.offered) if function.strict]
    # A budget for messages needs a grammar of whole outputs, which must include the calls
    is_bounded = isinstance(thought, MessageGrammar) and thought.max_tokens is not None
    if not (strict or (is_bounded and grammar) or (tools.is_alone and not stop)):
        return _bounded(plan, thought, words)
    in_text = None
    if grammar is not None:
        in_text = grammar.calls_in_text(
            _checked(functions), thought, may_be_several=not tools.is_alone
        )
    if in_text is not None:
        return _formed(plan, in_text, before)
    if strict:
        raise UnimplementedError(
            f"{words.path(strict[0])}.strict is true; with this model it is supported only if"
            f" {words.choice} is {words.forced} or names a function"
        )
    raise UnimplementedError(
        f"{words.alone}, which this model does not support: its calls have no markers that are"
        " tokens"
    )


def _checked(functions: Sequence[ForcedFunction]) -> Sequence[ForcedFunction]:
    """Return the functions, after checking each `$ref` in their schemas (`check_refs`)."""
    for function in functions:
        check_refs(function.schema, "tools")
    return functions


def _inline(form: StructuredOutput, words: ChatWords) -> str:
    """Return `form`, the structured output that the client asks for, as a term of a grammar.

    Raises:
        InvalidArgumentError: The schema is not JSON or has an unsupported feature.
        UnimplementedError: The client asks for something other than JSON, for example a regex.
    """
    if form.json_object:
        return inline_json({"type": "object"})
    field = words.forms[f"structured.{form.form}"]
    if form.json_schema is None:
        raise UnimplementedError(
            f'{field} is set; with tools it must be unset, or tool_choice must be "none"'
        )
    try:
        schema = from_json(form.schema_text)
    except ValueError as error:
        raise InvalidArgumentError(field, f"is not JSON: {error}") from None
    check_refs(schema, field)
    return inline_json(schema)


def _formed(plan: OutputPlan, grammar: str, before: str) -> OutputPlan:
    return replace(plan, structured=StructuredOutput(grammar=grammar), before_form=before)


def _bounded(plan: OutputPlan, thought: Thought | None, words: ChatWords) -> OutputPlan:
    """Add the thinking budget, if there is one, to a plan for outputs of free text."""
    if thought is None or thought.max_tokens is None:
        return plan
    named = {"structured": words.thinking, "structured.grammar": words.thinking}
    return replace(_formed(plan, thought.text(), thought.before("text")), field_to_json=named)


def _plain_json(functions: Sequence[Function]) -> OutputPlan:
    """Plan a forced call of one of the functions, for a model whose syntax of calls is unknown.

    The model writes the call as plain JSON.
    """
    named = {"structured.json_schema": "tools"}
    if len(functions) == 1:
        (function,) = functions
        form = _json_schema(function.schema_of_arguments())
        return OutputPlan(lambda: ForcedCall(function.name), form, field_to_json=named)
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": function.schema_of_arguments(),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schemas = {function.name: function.schema_of_arguments() for function in functions}
    form = _json_schema({"anyOf": calls})
    return OutputPlan(lambda: chosen_call(schemas), form, field_to_json=named)


def _json_schema(schema: Mapping[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=schema)

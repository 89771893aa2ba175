"""Grammars for gpt-oss's messages: thinking within a budget, then text, a form or a call.

A form is an output in the structure that the request asks for, such as JSON that follows a schema.
A budget limits the tokens of each message of thinking. With a budget, there are never two messages
of thinking in a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

_MARKERS: Final = ("start", "channel", "constrain", "message", "end", "return", "call")

Answer: TypeAlias = Literal["text", "form", "call"]
"""What follows thinking."""


@dataclass(frozen=True, slots=True)
class MessageGrammar:
    """The grammar of an output that consists of messages."""

    ids: Mapping[str, int]
    """The token id of each marker."""
    begun: str
    """The channel of a message that the prompt has begun; empty: the output begins a message."""
    max_tokens: int | None
    """Maximum number of tokens of each message of thinking; None: no limit."""

    def before(self, answer: Answer) -> str:
        """Return grammar rules; the rule named `before` matches the messages before an answer.

        If the answer is a form, the rule also matches the header of the form's message. The result
        is "" in two cases: if the answer is text, because the grammar that `text` returns includes
        the messages before the text; and if the answer is a form whose message the prompt has
        begun, because then nothing comes before the form.
        """
        if answer == "text" or (answer == "form" and self.begun == "final"):
            return ""
        header = "header" if answer == "form" else ""
        return "\n".join([f"before: {self._before_last} {header}", *self._rules])

    def text(self, call: str = "") -> str:
        """Return a grammar for messages; the last message may be a call that matches `call`."""
        last = "note | header said" + (f" | {call}" if call else "")
        start = f"{self._before_last} last"
        if self.begun:
            start = f"{self._rest_of_begun} | {start}"
        return "\n".join([f"start: {start}", f"last: {last}", *self._rules])

    def form(self, form: str, call: str) -> str:
        """Return a grammar for messages; the last message has the given form, or is a call.

        `form` and `call` are terms of the grammar that match the form and the call.
        """
        start = f"{self._before_last} (header {form} | {call})"
        if self.begun == "final":
            start = form
        return "\n".join([f"start: {start}", *self._rules])

    @property
    def _rest_of_begun(self) -> str:
        return "thought" if self.begun == "analysis" else "said"

    @property
    def _before_last(self) -> str:
        """A term for all messages before the last one, each followed by the rule `next`.

        `next` matches the markers between two messages.
        """
        match self.max_tokens:
            case None:
                first, more = "", "((analysis | note) next)*"
            case 0:
                first, more = "", "(note next)*"
            case _:
                first, more = "(analysis next)?", "(note next (analysis next)?)*"
        if self.begun:
            first = f"{self._rest_of_begun} next {'' if self.begun == 'analysis' else first}"
        return f"{first} {more}".strip()

    @property
    def _rules(self) -> list[str]:
        ids, text = self.ids, f"<[^{','.join(map(str, sorted(self.ids.values())))}]>"
        channel, message = f"<[{ids['channel']}]>", f"<[{ids['message']}]>"
        count = "*" if self.max_tokens is None else f"{{0,{self.max_tokens}}}"
        return [
            f"thought: {text}{count}" if self.max_tokens != 0 else 'thought: ""',
            f"said: {text}*",
            f'analysis: {channel} "analysis" {message} thought',
            f'note: {channel} "commentary" {message} said',
            f'header: {channel} "final" (" "? <[{ids["constrain"]}]> "json")? {message}',
            f'next: <[{ids["end"]}]> <[{ids["start"]}]> "assistant"',
        ]


def message_grammar(
    token_id: Callable[[str], int | None], begun: str, max_tokens: int | None
) -> MessageGrammar | None:
    """Return the grammar for an output's messages; None unless each marker is a single token."""
    ids = {name: found for name in _MARKERS if (found := token_id(f"<|{name}|>")) is not None}
    return MessageGrammar(ids, begun, max_tokens) if len(ids) == len(_MARKERS) else None

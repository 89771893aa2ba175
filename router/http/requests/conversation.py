"""Makes the prompt of a chat and plans its outputs; the HTTP APIs share this code."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from contract.errors import UnimplementedError
from contract.sampling import StructuredOutput
from router.http.requests.chat_words import ChatWords
from router.http.requests.outputs import OutputPlan, plan_outputs
from router.http.requests.tools import ToolFields, ToolUse
from router.parsers.choosing import OutputParsers
from router.request.inference import Inference
from router.text.chat_template import ChatTemplate

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn thinking on or off."""

_NO_TOOLS = ToolFields.model_validate({})


def thinking_switch(template: ChatTemplate) -> str | None:
    """Return the template's variable that turns thinking on or off; None: it has none."""
    return next((name for name in _SWITCHES if name in template.variables), None)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat, from any HTTP API: its messages, its tools, and how to make the outputs."""

    model: str
    messages: Iterable[Mapping[str, Any]]
    """The messages, as `Message.for_template` returns them. Iterating over them may take long, so a
    thread does it."""
    words: ChatWords
    """The names of fields in the client's JSON, for errors."""
    tools: ToolFields = _NO_TOOLS
    form: StructuredOutput | None = None
    """The form that each output must have, such as a JSON schema; None: free text."""
    thinking_budget: int | None = None
    """Limit on thinking tokens; at the limit, a grammar forces the marker that ends thinking."""
    effort: Effort | None = None
    """How much to think; requests with an effort need a chat template that supports it."""
    continued: str = ""
    """The assistant's last message, if outputs continue it."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """Replaces the model's template. The router refuses it without
    `--trust-request-chat-template`."""

    async def prepare(self, inference: Inference) -> tuple[str, OutputPlan]:
        """Return the prompt, including special tokens, and the plan for its outputs.

        May raise QuireError.
        """
        template = inference.text.chat_template(self.model, self.chat_template)
        parsers = inference.text.parsers(template)
        tools = self.tools.tool_use(template, parsers, self.words)
        prompt = await inference.text.render_chat(
            self.model,
            self.messages,
            template,
            **self._kwargs(template),
            **({} if tools is None else {"tools": tools.for_template}),
        )
        return prompt, await self._plan(inference, parsers, tools, prompt)

    async def output_plan(self, inference: Inference, prompt: str) -> OutputPlan:
        """Return the output plan of a chat that already has a prompt, as a stored response has."""
        template = inference.text.chat_template(self.model, self.chat_template)
        parsers = inference.text.parsers(template)
        tools = self.tools.tool_use(template, parsers, self.words)
        return await self._plan(inference, parsers, tools, prompt)

    async def _plan(
        self, inference: Inference, parsers: OutputParsers, tools: ToolUse | None, prompt: str
    ) -> OutputPlan:
        return await inference.text.run(
            lambda: plan_outputs(
                parsers,
                tools,
                self.form,
                prompt=prompt,
                continued=self.continued,
                thinking_budget=self.thinking_budget,
                words=self.words,
            )
        )

    def _kwargs(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the template's variables other than messages and tools.

        Raises:
            UnimplementedError: The template does not support `effort`.
        """
        if self.effort is None:
            return dict(self.template_kwargs)
        if self.effort == "none" and (switch := thinking_switch(template)) is not None:
            return {switch: False, **self.template_kwargs}
        if self.effort == "none" or "reasoning_effort" not in template.variables:
            raise UnimplementedError(
                f'reasoning_effort is "{self.effort}"; the model\'s chat template does not'
                " support it"
            )
        return {"reasoning_effort": self.effort, **self.template_kwargs}

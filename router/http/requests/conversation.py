"""A chat as every API makes it: what its template gets, and how its outputs are read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from contract.errors import UnimplementedError
from contract.sampling import StructuredOutput
from router.http.requests.outputs import OutputPlan, plan_outputs
from router.http.requests.tools import ToolFields, ToolUse
from router.parsers.choosing import OutputParsers
from router.request.inference import Inference
from router.text.chat_template import ChatTemplate

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_SWITCHES = ("enable_thinking", "thinking")
"""Names by which templates are told whether to think."""

_NO_TOOLS = ToolFields.model_validate({})


def thinking_switch(template: ChatTemplate) -> str | None:
    """Return the variable that tells a template whether to think; None: it has none."""
    return next((name for name in _SWITCHES if name in template.variables), None)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages, tools and form of one chat, whichever API it came by."""

    model: str
    messages: Iterable[Mapping[str, Any]]
    """As a chat template gets them (`Message.for_template`); a thread iterates over them."""
    tools: ToolFields = _NO_TOOLS
    form: StructuredOutput | None = None
    thinking_budget: int | None = None
    """Most tokens of thinking; then its end marker is forced."""
    effort: Effort | None = None
    """How much to think, if the chat template knows it."""
    continued: str = ""
    """The assistant's message at the end, if outputs continue it."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """Instead of the model's own, if the service trusts requests."""

    async def prepare(self, inference: Inference) -> tuple[str, OutputPlan]:
        """Return the prompt, special tokens included, and how its outputs are written and read.

        Raises QuireError.
        """
        template = inference.text.chat_template(self.model, self.chat_template)
        parsers = inference.text.parsers(template)
        tools = self.tools.tool_use(template, parsers)
        prompt = await inference.text.render_chat(
            self.model,
            self.messages,
            template,
            **self._kwargs(template),
            **({} if tools is None else {"tools": tools.for_template}),
        )
        return prompt, await self._plan(inference, parsers, tools, prompt)

    async def output_plan(self, inference: Inference, prompt: str) -> OutputPlan:
        """Return how the outputs are read of a chat that was prepared before, with this prompt."""
        template = inference.text.chat_template(self.model, self.chat_template)
        parsers = inference.text.parsers(template)
        tools = self.tools.tool_use(template, parsers)
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
            )
        )

    def _kwargs(self, template: ChatTemplate) -> dict[str, Any]:
        """Return what the template gets besides messages and tools.

        Raises:
            UnimplementedError: It does not know the effort.
        """
        if self.effort is None:
            return dict(self.template_kwargs)
        if self.effort == "none" and (switch := thinking_switch(template)) is not None:
            return {switch: False, **self.template_kwargs}
        if self.effort == "none" or "reasoning_effort" not in template.variables:
            raise UnimplementedError(
                f'reasoning_effort is "{self.effort}"; the model\'s chat template does not know it'
            )
        return {"reasoning_effort": self.effort, **self.template_kwargs}

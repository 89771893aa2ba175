"""Makes fill-in-the-middle prompts: markers, and the texts before and after the output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class InfillForm:
    """How some models write a fill-in-the-middle prompt."""

    markers: tuple[str, ...]
    """The markers before the prefix, the suffix and the output, in this order."""
    is_suffix_first: bool = False
    """Whether the suffix comes before the prefix; then the output has no marker."""

    def prompt(self, prefix: str, suffix: str) -> str:
        if self.is_suffix_first:
            before_prefix, before_suffix = self.markers
            return f"{before_suffix}{suffix}{before_prefix}{prefix}"
        before_prefix, before_suffix, before_output = self.markers
        return f"{before_prefix}{prefix}{before_suffix}{suffix}{before_output}"


_FORMS: Final = (
    InfillForm(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),  # Qwen
    InfillForm(("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),  # StarCoder, Granite
    InfillForm(("<fim-prefix>", "<fim-suffix>", "<fim-middle>")),  # SantaCoder
    InfillForm(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),  # DeepSeek
    InfillForm(("▁<PRE>", "▁<SUF>", "▁<MID>")),  # Code Llama
    InfillForm(("[PREFIX]", "[SUFFIX]"), is_suffix_first=True),  # Codestral
)


def infill(prefix: str, suffix: str, token_id: Callable[[str], int | None]) -> str | None:
    """Return the prompt for the text between `prefix` and `suffix`.

    Returns None if the model has no markers for infilling.
    """
    for form in _FORMS:
        if all(token_id(marker) is not None for marker in form.markers):
            return form.prompt(prefix, suffix)
    return None

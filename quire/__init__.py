"""Python interface: `LLM` for offline use, the client, the stubs and the command line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.client.types import BeamSearch, SamplingParams, StructuredOutput
    from quire.llm import LLM, Generation

__all__ = ["LLM", "BeamSearch", "Generation", "SamplingParams", "StructuredOutput"]


def __getattr__(name: str) -> object:
    """Import the names in `__all__` at their first use.

    `import quire.v1` and `quire down` also run this module. They need none of these names, and
    importing the names takes time.
    """
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from quire import llm  # noqa: PLC0415 - see above
    from quire.client import types  # noqa: PLC0415 - see above

    value: object = getattr(llm if name in ("LLM", "Generation") else types, name)
    globals()[name] = value
    return value

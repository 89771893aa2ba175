"""`quire generate`: continues one prompt."""

import sys
from collections.abc import Sequence
from typing import Literal

from quire.cli.settings import ClientSettings, GenerateSettings
from quire.cli.streaming import show_each, show_one
from quire.cli.target import connection_errors, find_target, open_client
from quire.client.types import BeamSearch, SamplingParams
from rpc.settings import parse_settings


def main(argv: Sequence[str]) -> int:
    settings = parse_settings(GenerateSettings, "quire generate", argv)
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    target = find_target(settings)
    with connection_errors(target), open_client(target, settings) as client:
        events = client.generate(
            prompt,
            sampling_from(settings, ignore_eos=settings.ignore_eos),
            timeout_s=settings.timeout_s,
            model=settings.served_model_name,
            n=settings.n,
            beam=beam_from(settings),
            stop=(settings.stop,) if settings.stop else (),
            cache_pin_s=settings.cache_pin_s,
            resumable=True,
        )
        if settings.n > 1:
            show_each(events, settings.n)
        else:
            show_one(events)
            print()
    return 0


def beam_from(settings: GenerateSettings) -> BeamSearch | None:
    """Return the beam search that the flags ask for; None if --beam-width is not set."""
    if settings.beam_width is None:
        return None
    stopping: dict[str, bool | Literal["never"]] = {"false": False, "true": True, "never": "never"}
    return BeamSearch(
        settings.beam_width, settings.length_penalty, stopping[settings.early_stopping]
    )


def sampling_from(settings: ClientSettings, *, ignore_eos: bool = False) -> SamplingParams:
    """Return the sampling parameters that the flags set."""
    return SamplingParams(
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_p=1.0 if settings.top_p is None else settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        max_tokens=settings.max_tokens,
        ignore_eos=ignore_eos,
    )

"""Offline generation: `LLM` starts a service for this program alone, and sends prompts to it.

    from quire import LLM, SamplingParams

    with LLM(model="path/to/model") as llm:
        for generation in llm.generate(["def add(", "import "], SamplingParams(max_tokens=32)):
            print(generation.prompt, generation.outputs[0].text)

`LLM` starts the service with `quire up`, so batching, prefix cache and tiers work as usual.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, Unpack

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contract.arrays import Float32Array
from contract.errors import InvalidArgumentError, TooBusyError
from quire.client import DEFAULT_SAMPLING, AsyncClient
from quire.client.closes import Closes
from quire.client.types import (
    Completion,
    EmbedOptions,
    GenerateOptions,
    Output,
    PromptScores,
    SamplingParams,
    Usage,
)
from quire.private_service import PrivateService

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

MAX_REQUESTS: Final = 512
"""Maximum number of requests that `LLM` sends at once: enough to keep the service busy, but fewer
than a router accepts."""

_INPUTS_OF_A_CALL: Final = 512
"""Maximum number of inputs in one call of `Embed`."""

_RESERVED: Final = frozenset({"attached", "demo", "detach", "grpc_port", "host", "uds", "verbose"})
"""Flags of `quire up` that `LLM` sets itself."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generation:
    """The outputs for one prompt."""

    prompt: Prompt
    request_id: str
    outputs: tuple[Output, ...]
    """The outputs, by output index."""
    usage: Usage
    prompt_scores: PromptScores | None = None
    """Logprobs of the prompt's tokens; set if `prompt_logprobs` was requested."""


class LLM(Closes):
    """A model, and the processes that serve it until `close`, or until this process ends.

    Threads may share an LLM.
    """

    def __init__(
        self, model: str | Path | None = None, *, api_key: str = "", **flags: object
    ) -> None:
        """Start the processes, and wait until they are ready.

        `model` is a directory, a GGUF file or a name on the hub, as for `quire up`; by default, it
        is the small model that Quire ships. `flags` are flags of `quire up`, such as `device="cpu"`
        or `num_blocks=512`. If `api_key` is set, the service refuses calls without this key, also
        over HTTP; `LLM` itself sends the key. Raises ServiceStartError, with the reason, if the
        start fails, and TypeError for a flag that `LLM` sets itself.
        """
        if refused := sorted(_RESERVED & flags.keys()):
            raise TypeError(f"LLM sets {', '.join(refused)} itself; leave it out")
        if model is not None:
            flags["model"] = model
        self._api_key = api_key
        self._service = PrivateService(flags, api_key)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = DEFAULT_SAMPLING,
        *,
        progress: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]:
        """Generate for one prompt or many; return the results in the order of the prompts.

        A prompt is text or token ids. `sampling` is one object for all prompts, or a list with one
        for each prompt; `options` (`n`, `stop`, ...) apply to all. `progress` shows a bar on
        standard error. The first prompt that fails ends the call. An InvalidArgumentError names the
        prompt and the field, for example `prompts[3].sampling.max_tokens`; other errors are those
        of `AsyncClient`.
        """
        listed = _listed(prompts)
        each = [sampling] * len(listed) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(listed):
            raise InvalidArgumentError(
                "sampling", f"has {len(each)} entries; there are {len(listed)} prompts"
            )
        if "request_id" in options and len(listed) != 1:
            raise InvalidArgumentError("request_id", f"is set; there are {len(listed)} prompts")
        bar = Progress(
            TextColumn("{task.description}"),
            *Progress.get_default_columns()[1:3],
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not progress,
        )
        with bar:
            task = bar.add_task("generating", total=len(listed), rate="")
            num_tokens = 0

            def on_done(completion: Completion) -> None:
                nonlocal num_tokens
                num_tokens += completion.usage.completion_tokens
                elapsed_s = bar.tasks[task].elapsed or 0.0
                rate = f"{num_tokens / elapsed_s:,.0f} tokens/s" if elapsed_s else ""
                bar.update(task, advance=1, rate=rate)

            client = functools.partial(AsyncClient, self._service.target, api_key=self._api_key)
            completions = _run(_generate(client, listed, each, options, on_done))
        return [
            Generation(prompt, done.request_id, done.outputs, done.usage, done.prompt)
            for prompt, done in zip(listed, completions, strict=True)
        ]

    def embed(
        self, inputs: Prompt | Sequence[Prompt], **options: Unpack[EmbedOptions]
    ) -> Float32Array:
        """Return an embedding of each input, float32[N, size], in the order of the inputs.

        An input is text or token ids. The first failure ends the call; errors are those of
        `AsyncClient`.
        """
        listed = _listed(inputs)
        client = functools.partial(AsyncClient, self._service.target, api_key=self._api_key)
        parts = _run(_embed(client, listed, options))
        return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)

    def close(self) -> None:
        """Stop the processes; may be called again."""
        self._service.close()


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return `prompts` as a list of prompts; a string or a list of numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


async def _embed(
    open_client: Callable[[], AsyncClient], inputs: Sequence[Prompt], options: EmbedOptions
) -> list[Float32Array]:
    async with open_client() as client:
        return [
            (await client.embed(inputs[first : first + _INPUTS_OF_A_CALL], **options)).vectors
            for first in range(0, len(inputs), _INPUTS_OF_A_CALL)
        ]


async def _generate(
    open_client: Callable[[], AsyncClient],
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParams],
    options: GenerateOptions,
    on_done: Callable[[Completion], None],
) -> list[Completion]:
    """Run up to MAX_REQUESTS requests at a time; the first error cancels all other requests."""
    completions: list[Completion | None] = [None] * len(prompts)
    left = iter(range(len(prompts)))

    async def work(client: AsyncClient) -> None:
        for i in left:  # the workers share this iterator
            completion = await _generate_one(client, i, prompts[i], sampling[i], options)
            completions[i] = completion
            on_done(completion)

    async with open_client() as client:
        workers = [
            asyncio.create_task(work(client)) for _ in range(min(MAX_REQUESTS, len(prompts)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return [completion for completion in completions if completion is not None]


async def _generate_one(
    client: AsyncClient,
    index: int,
    prompt: Prompt,
    sampling: SamplingParams,
    options: GenerateOptions,
) -> Completion:
    while True:
        try:
            return await client.generate_once(prompt, sampling, **options)
        except TooBusyError as error:  # may happen, because a request has `n` sequences
            await asyncio.sleep(error.retry_after_s)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"prompts[{index}].{error.field}", error.problem) from None


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new thread, because the caller may run an event loop, as in notebooks.

    If the wait is interrupted, for example by Ctrl-C, the coroutine is cancelled.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="quire generate", daemon=True)
    thread.start()
    try:
        return asyncio.run_coroutine_threadsafe(main, loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Streams during faults; each is compared with the result of the same request without faults."""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from contract.errors import AlreadyExistsError, QuireError, TooBusyError, UnavailableError
from contract.sampling import BeamSearch
from quire.client import AsyncClient, OutputDelta, OutputFinished, SamplingParams
from quire.client.retry import Retry
from quire.client.types import StructuredOutput

_RETRY = Retry(resume_within_s=120.0)
_ASK_AGAIN_S = 0.2
_TIMEOUT_S = 400.0
_NUM_CLIENTS = 8
_NUM_TOKENS = 120


@dataclass(frozen=True, slots=True)
class Case:
    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    model: str = ""
    beam: BeamSearch | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate` by name."""
        return {"n": self.n, "stop": self.stop, "model": self.model, "beam": self.beam}


@dataclass(slots=True)
class Output:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: OutputFinished | None = None


@dataclass(slots=True)
class Stream:
    """The events of one request."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    outputs: dict[int, Output] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    """The times of the call and of all events, by the monotonic clock."""
    num_duplicated: int = 0
    error: str | None = None

    def take(self, event: object) -> None:
        """Record an event. Tokens that come again count as duplicated, and are dropped."""
        self.times_s.append(time.monotonic())
        match event:
            case OutputDelta(index, offset, token_ids, text):
                output = self.outputs.setdefault(index, Output())
                num_again = len(output.token_ids) - offset
                self.num_duplicated += max(0, num_again)
                output.token_ids.extend(token_ids[max(0, num_again) :])
                output.text += text
            case OutputFinished(index):
                self.outputs.setdefault(index, Output()).end = event


@dataclass(slots=True)
class Verdict:
    """The errors of all streams so far, with counts of tokens."""

    num_streams: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    """Calls that failed before a token, and were made again."""
    lost: int = 0
    duplicated: int = 0
    contradicted: int = 0
    errors: list[str] = field(default_factory=list)

    def judge(self, stream: Stream, expected: Stream) -> None:
        """Compare a stream that has ended with its reference, which met no fault."""
        self.num_streams += 1
        self.duplicated += stream.num_duplicated
        for index, wanted in expected.outputs.items():
            got = stream.outputs.get(index, Output())
            self.num_tokens += len(got.token_ids)
            self.lost += max(0, len(wanted.token_ids) - len(got.token_ids))
            self.contradicted += max(0, len(got.token_ids) - len(wanted.token_ids)) + sum(
                a != b for a, b in zip(got.token_ids, wanted.token_ids, strict=False)
            )
            if (got.text, got.end) != (wanted.text, wanted.end) and stream.error is None:
                self._note(f"output {index}: {got.end}, not {wanted.end}: {got.text!r}")
        if stream.error is not None:
            self._note(stream.error)

    def _note(self, error: str) -> None:
        self.errors.append(f"{time.strftime('%H:%M:%S')} {error}")  # as the processes' logs do


def make_cases(chance: random.Random, num: int) -> list[Case]:
    """Draw requests of every kind; some share a long beginning."""
    beginnings = [tuple(chance.randrange(2, 4000) for _ in range(400)) for _ in range(3)]
    form = StructuredOutput(regex="([a-z]{1,8} ){20,40}")
    cases = []
    for index in range(num):
        long = chance.choice(beginnings)[: chance.choice((100, 257, 400))]
        tail = tuple(chance.randrange(2, 4000) for _ in range(chance.randrange(1, 40)))
        drawn = SamplingParams(
            temperature=0.9,
            top_p=0.95,
            seed=chance.randrange(2**31),
            max_tokens=chance.randrange(_NUM_TOKENS // 2, _NUM_TOKENS),
            ignore_eos=True,
        )
        match index % 6:
            case 0:
                cases.append(Case(tail, replace(drawn, temperature=0.0)))
            case 1:
                cases.append(Case(long + tail, drawn, n=3))
            case 2:
                cases.append(Case(tail, replace(drawn, frequency_penalty=0.5, top_k=50)))
            case 3:
                cases.append(Case("def form(", replace(drawn, structured=form, ignore_eos=False)))
            case 4:
                cases.append(Case(long + tail, replace(drawn, temperature=0.0), n=2))
            case _:  # `prepare` replaces the stop string
                cases.append(Case("import ", drawn, stop=("?",)))
    return cases


class Streams:
    """Keeps a number of streams live, and judges each stream when it has ended."""

    def __init__(self, targets: Sequence[str]) -> None:
        """`targets` are the routers; each is the first choice of the same share of clients."""
        self.verdict = Verdict()
        self.finished: list[Stream] = []
        self._clients = [
            AsyncClient([*targets[i % len(targets) :], *targets[: i % len(targets)]], retry=_RETRY)
            for i in range(_NUM_CLIENTS)
        ]
        self._expected: dict[int, Stream] = {}
        """The reference of each case, by its index."""
        self._cases: list[Case] = []
        self._is_over = False

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def prepare(self, cases: Sequence[Case]) -> None:
        """Compute each case alone, while nothing fails; raises RuntimeError if one fails."""
        for case in cases:
            prepared = case
            stream = await self._read(self._clients[0], case)
            if case.stop and stream.error is None:  # a text that appears only after many tokens
                text = stream.outputs[0].text
                prepared = replace(case, stop=(text[len(text) * 3 // 4 :][:5],))
                stream = await self._read(self._clients[0], prepared)
            if stream.error is not None:
                raise RuntimeError(f"without any fault, {case}: {stream.error}")
            self._expected[len(self._cases)] = stream
            self._cases.append(prepared)

    @contextlib.asynccontextmanager
    async def keep_live(self, num: int, chance: random.Random) -> AsyncIterator[None]:
        """Keep `num` streams live within the block; at the end, wait until they have ended."""
        self._is_over = False
        async with asyncio.TaskGroup() as slots:
            for slot in range(num):
                seed = chance.randrange(2**31)
                slots.create_task(self._slot(self._clients[slot % _NUM_CLIENTS], seed))
            try:
                yield
            finally:
                self._is_over = True

    async def _slot(self, client: AsyncClient, seed: int) -> None:
        chance = random.Random(seed)
        while not self._is_over:
            index = chance.randrange(len(self._cases))
            stream = await self._read(client, self._cases[index])
            self.finished.append(stream)
            self.verdict.judge(stream, self._expected[index])

    async def _read(self, client: AsyncClient, case: Case) -> Stream:
        stream = Stream()
        was_refused = False
        ask_until = time.monotonic() + _TIMEOUT_S
        while True:
            stream.times_s = [time.monotonic()]
            try:
                async for event in client.generate(
                    case.prompt,
                    case.sampling,
                    timeout_s=_TIMEOUT_S,
                    resumable=True,
                    request_id=stream.request_id,
                    **case.options,
                ):
                    stream.take(event)
            except (UnavailableError, TooBusyError, AlreadyExistsError) as error:
                # A call without an event has promised nothing. Its request may still be live, so
                # only the next call with this id may find that it exists already.
                is_own = was_refused or not isinstance(error, AlreadyExistsError)
                if is_own and not stream.outputs and time.monotonic() < ask_until:
                    was_refused = True
                    self.verdict.num_refused += 1
                    await asyncio.sleep(_ASK_AGAIN_S)
                    continue
                stream.error = f"{type(error).__name__}: {error}"
            except QuireError as error:
                stream.error = f"{type(error).__name__}: {error}"
            return stream


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest pause of a stream after a fault that it lived through."""

    kind: str
    """The kind of the fault."""
    stalled_s: float
    """Seconds since the fault, or since the last event if that was later."""
    ended_at_s: float
    """When the pause ended, on the monotonic clock."""
    request_id: str


def stalls(streams: Sequence[Stream], faults: Sequence[tuple[float, str]]) -> Iterator[Stall]:
    """Yield a stall for each stream and each fault that the stream lived through.

    `faults` are times and kinds, in order. A fault's stall is the longest of the pauses that end
    after the fault and begin before the next one.
    """
    ends_s = [*(at_s for at_s, _ in faults[1:]), float("inf")]
    for (at_s, kind), next_s in zip(faults, ends_s, strict=True):
        for stream in streams:
            times_s = stream.times_s
            if times_s[0] <= at_s < times_s[-1]:
                pauses = [p for p in pairwise(times_s) if p[1] > at_s and p[0] < next_s]
                longest_s, end_s = max((b - max(a, at_s), b) for a, b in pauses)
                yield Stall(kind, longest_s, end_s, stream.request_id)

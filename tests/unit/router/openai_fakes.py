"""An inference service that answers from a script, and records its requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from contract.errors import InvalidArgumentError, NotFoundError, UnimplementedError
from contract.outputs import Event, FinishReason, OutputDelta, OutputFinished, TokenLogprob, Usage
from contract.request import GenerateRequest, Model
from quire.v1 import adapters_pb2, common_pb2
from quire.v1.common_pb2 import Load
from router.live.live_request import ClientRoom
from router.live.thinking_counter import ThinkingCounter
from router.parsers.choosing import OutputParsers, choose_parsers
from router.text.chat_settings import ChatSettings
from router.text.chat_template import ChatTemplate
from router.text.infill import infill
from rpc.observe import telemetry

T = TypeVar("T")
Script = Callable[[GenerateRequest], AsyncIterator[Event]]

MODEL = Model(id="org/tiny", max_model_len=64, vocab_size=0x110000, eos_token_ids=(0,))


def spell(text: str, reason: FinishReason = FinishReason.STOP, **finish: Any) -> Script:
    """Each output is `text`, one character per delta, and has the finish reason `reason`."""

    async def events(request: GenerateRequest) -> AsyncIterator[Event]:
        num_thinking = 0
        for j in range(request.n):
            counter = request.thinking and ThinkingCounter(request.thinking)
            for offset, character in enumerate(text):
                if counter and not counter.push(character):
                    num_thinking, counter = num_thinking + counter.num_tokens, None
                yield delta(character, output_index=j, offset=offset, request=request)
            yield OutputFinished(j, reason, **finish)
        yield Usage(len(request.prompt), len(text) * request.n, 1, 2, num_thinking)

    return events


def delta(
    text: str, *, output_index: int = 0, offset: int = 0, request: GenerateRequest | None = None
) -> OutputDelta:
    """A token per character, whose id is the code point."""
    token_ids = tuple(map(ord, text))
    num_top = None if request is None else request.sampling.logprobs
    logprobs = ()
    if num_top is not None:
        top = tuple((ord("A") + rank, -2.0 - rank) for rank in range(num_top))
        logprobs = tuple(TokenLogprob(-0.5, top) for _ in token_ids)
    return OutputDelta(output_index, offset, token_ids, text, logprobs)


def play(events: Iterable[Event | Exception]) -> Script:
    """Return the same events for every request; an exception among them is raised."""
    events = list(events)

    async def script(_: GenerateRequest) -> AsyncIterator[Event]:
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield event

    return script


class FakeLiveRequest:
    def __init__(self, request: GenerateRequest, events: AsyncIterator[Event]) -> None:
        self.request_id = request.request_id
        self.model = request.model or MODEL.id
        self.created = 1_700_000_000
        self.prompt_token_ids = (1, 2, 3)
        self.usage = Usage(3, 0, 1)
        self.num_taken = 0
        self.closed = asyncio.Event()
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._events)
        self.num_taken += 1
        return event

    async def send_to(self, put: Callable[[Event], None], room: ClientRoom | None = None) -> None:
        async for event in self:
            if room is not None and not room.has_room():
                await room.wait_for_room()
            put(event)

    async def aclose(self) -> None:
        self.closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class FakeModel:
    def info(self, name: str = "") -> Model:
        if name not in ("", MODEL.id):
            raise NotFoundError(f"model {name} is not served")
        return MODEL

    def infos(self) -> tuple[Model, ...]:
        return (MODEL,)


class FakeDetokenizer:
    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class FakeText:
    """A token per character, whose id is the code point."""

    def __init__(self, model: FakeModel) -> None:
        self.template = ChatTemplate("{{ tools }}<tool_call>", {})
        self.chats: list[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]] = []
        self.marker_ids: dict[str, int] = {}
        """Markers that are special tokens."""
        self._model = model

    async def render_chat(
        self,
        model: str,
        messages: Iterable[Mapping[str, Any]],
        template: ChatTemplate | None = None,
        **template_kwargs: Any,
    ) -> str:
        del model, template
        messages = list(messages)
        self.chats.append((messages, template_kwargs))
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def chat_template(self, model: str, source: str | None = None) -> ChatTemplate:
        del model
        return self.template if source is None else ChatSettings().template_of_request(source, {})

    def parsers(self, template: ChatTemplate) -> OutputParsers:
        return OutputParsers(
            *choose_parsers(template.source, "", ""),
            token_id=self.marker_ids.get,
            is_special=self.marker_ids.__contains__,
        )

    async def run(self, work: Callable[[], T]) -> T:
        return work()

    def detokenizer(self, *, skip_special_tokens: bool) -> "FakeDetokenizer":
        del skip_special_tokens
        return FakeDetokenizer()

    def infill(self, prefix: str, suffix: str) -> str:
        prompt = infill(prefix, suffix, self.marker_ids.get)
        if prompt is None:
            raise UnimplementedError("suffix is set; the model has no tokens to fill in the middle")
        return prompt

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    async def tokenize(
        self, model: str, text: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        self._model.info(model)
        if len(text) > MODEL.max_model_len:
            raise InvalidArgumentError("text", f"has {len(text)} bytes; it must have at most 64")
        return [*([0] if add_special_tokens else ()), *map(ord, text)]

    async def tokenize_chat(
        self,
        model: str,
        messages: Iterable[Mapping[str, Any]],
        template: ChatTemplate | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        return [*map(ord, await self.render_chat(model, messages, template, **template_kwargs))]

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        self._model.info(model)
        for i, token_id in enumerate(token_ids):
            if token_id >= MODEL.vocab_size:
                raise InvalidArgumentError(f"token_ids[{i}]", f"is {token_id}; it is too large")
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)


class FakeInference:
    def __init__(self) -> None:
        self.script: Script = spell("Hi!")
        self.refusal: Exception | None = None
        self.quota_refusal: Exception | None = None
        self.quota_checks: list[int] = []
        self.most_live: int | None = None
        self.requests: list[GenerateRequest] = []
        self.lives: list[FakeLiveRequest] = []
        self.model = FakeModel()
        self.text = FakeText(self.model)
        self.traceparents: list[str] = []
        self.generated = asyncio.Event()

    def check_room(self, model: str) -> None:
        pass

    async def check_capacity(self, num_requests: int, n: int) -> None:
        if self.most_live is not None and num_requests * n > self.most_live:
            raise InvalidArgumentError("prompt", f"makes this a call of {num_requests * n}")

    def check_quota(self, num_bytes: int) -> None:
        self.quota_checks.append(num_bytes)
        if self.quota_refusal is not None:
            raise self.quota_refusal

    async def generate(self, request: GenerateRequest) -> FakeLiveRequest:
        if self.refusal is not None:
            raise self.refusal
        self.model.info(request.model)
        self.requests.append(request)
        self.traceparents.append(telemetry.inject())
        self.lives.append(FakeLiveRequest(request, self.script(request)))
        self.generated.set()
        return self.lives[-1]

    async def load(self) -> Load:
        names = [field.name for field in Load.DESCRIPTOR.fields]
        return Load(**{name: number for number, name in enumerate(names)})


class FakeCells:
    """One model, which answers to every name."""

    on_demand = None

    def __init__(self, inference: FakeInference) -> None:
        self.inference = inference
        self.infos = inference.model.infos
        self.check_quota = inference.check_quota

    async def use(self, model: str) -> FakeInference:
        return self.of(model)

    async def known(self, model: str) -> FakeInference:
        return self.of(model)

    def of(self, _: str) -> FakeInference:
        return self.inference

    async def load(self, model: str = "") -> Load:
        assert not model
        return await self.inference.load()


class FakeAdapters:
    """Fakes the router's calls to schedulers about adapters."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.names: set[str] = set()
        self.refusal: Exception | None = None
        self.quota_refusal: Exception | None = None
        self.quota_checks: list[int] = []

    async def load_adapter(
        self, name: str, directory: str, peer: str, model: str
    ) -> adapters_pb2.LoadAdapterResponse:
        self.calls.append((name, directory, peer, *filter(None, [model])))
        if self.refusal is not None:
            raise self.refusal
        was_there = name in self.names
        self.names.add(name)
        adapter = common_pb2.LoraAdapter(name=name, directory=directory)
        return adapters_pb2.LoadAdapterResponse(adapter=adapter, was_there=was_there)

    async def unload_adapter(self, name: str, peer: str) -> None:
        self.calls.append((name, peer))
        if name not in self.names:
            raise NotFoundError(f"LoRA adapter {name!r} is not loaded")
        self.names.remove(name)

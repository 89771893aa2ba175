"""A stream goes on when its router dies or its connection breaks, and nobody sees a difference."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.client import Client, FinishReason, OutputDelta, OutputFinished, SamplingParams, Usage
from quire.types import BeamSearch, StructuredOutput
from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from rpc.errors import NotFoundError
from tests.e2e.child import START_S, Child, eventually
from tests.e2e.generation import Result, generate_request
from tests.e2e.service import Service

NUM_TOKENS = 500
NUM_BEFORE = 20
"""So many tokens a stream has got when something breaks."""
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


class TwoRouters(Service):
    """Two routers in front of one scheduler, of which tests kill the first."""

    def __init__(self, directory: Path, model: Path, **flags: Any) -> None:
        super().__init__(directory, model, **flags)
        first = self._flags["router"]
        self._other_flags = [f"--uds={directory / 'other.sock'}", *first[1:]]
        self.other_target = f"unix:{directory / 'other.sock'}"
        self.other = Child("router", directory / "other.log", {})

    def start_router(self) -> None:
        super().start_router()
        if self.other._process is None:
            self.other.start(self._other_flags)

    @property
    def _children(self):
        return (*super()._children, self.other)

    def wait_until_ready(self) -> None:
        super().wait_until_ready()
        eventually(
            lambda: self.get_json(self.other, "/ready")[0] == 200 or None, "both are", START_S
        )

    @property
    def targets(self) -> list[str]:
        return [self.target, self.other_target]

    def other_stub(self) -> InferenceServiceStub:
        """The second router's, on a connection of its own."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        return InferenceServiceStub(grpc.insecure_channel(self.other_target, options))


@pytest.fixture(scope="module")
def routers(long_llama: Path, run_dir: Callable[[], Path]) -> Iterator[TwoRouters]:
    scheduler = ["--resume-grace-s=4"]
    with TwoRouters(
        run_dir(), long_llama, worker=["--num-blocks=600"], scheduler=scheduler
    ) as service:
        yield service


def requests_with(stop: str) -> list[tuple[Any, SamplingParams, dict[str, Any]]]:
    """Prompt, sampling and options of every kind of request whose stream must not differ."""
    drawn = SamplingParams(temperature=0.9, top_p=0.95, seed=11, frequency_penalty=0.3, **LONG)
    form = StructuredOutput(regex="[a-f ]+")
    return [
        ([5] * 40, drawn, {"n": 2}),
        ([5] * 40, drawn, {"n": 2, "stop": (stop,)} if stop else {}),
        (
            [7] * 9,
            SamplingParams(temperature=1.0, seed=5, structured=form, max_tokens=NUM_TOKENS),
            {},
        ),
        ([8] * 30, SamplingParams(seed=3, logprobs=2, prompt_logprobs=1, **LONG), {}),
        (
            [9, 10, 11],
            SamplingParams(max_tokens=150, ignore_eos=True),
            {"n": 2, "beam": BeamSearch(3)},
        ),
    ]


class Reader:
    """Reads a stream in a thread, and says when it has got some tokens."""

    def __init__(self, targets: list[str], prompt, sampling, options) -> None:
        self.is_under_way = threading.Event()
        if "beam" in options:  # nothing comes before all does
            self.is_under_way.set()
        self._pool = ThreadPoolExecutor(1)
        self._args = targets, prompt, sampling, options
        self.events: Future[list[Any]] = self._pool.submit(self._read)

    def _read(self) -> list[Any]:
        targets, prompt, sampling, options = self._args
        events, num_tokens = [], 0
        with Client(targets) as client:
            for event in client.generate(
                prompt, sampling, timeout_s=120, resumable=True, **options
            ):
                events.append(event)
                if isinstance(event, OutputDelta):
                    num_tokens += len(event.token_ids)
                    if num_tokens >= NUM_BEFORE:
                        self.is_under_way.set()
        self._pool.shutdown(wait=False)
        return events


def merged(events: list[Any]) -> list[Any]:
    """What the events come to, however the tokens were cut into deltas; fails on gap or repeat."""
    outputs: dict[int, list[Any]] = {}
    others = []
    for event in events:
        if isinstance(event, OutputDelta):
            token_ids, texts, logprobs = outputs.setdefault(event.output_index, [[], [], []])
            assert event.token_offset == len(token_ids), "a gap or a repeat"
            token_ids.extend(event.token_ids)
            texts.append(event.text)
            logprobs.extend(event.logprobs)
        elif isinstance(event, Usage):  # how much was cached differs between a first and a second
            others.append((event.prompt_tokens, event.completion_tokens))
        else:
            others.append(event)
    return [
        [
            (index, ids, "".join(texts), logs)
            for index, (ids, texts, logs) in sorted(outputs.items())
        ],
        sorted(map(str, others)),
    ]


def test_streams_go_on_through_another_router_when_theirs_is_killed(routers: TwoRouters):
    (unstopped,) = (Reader([routers.target], *requests_with("")[0]),)
    text = merged(unstopped.events.result(60))[0][0][2]
    requests = requests_with(stop=text[-30:-24])
    unfailed = [Reader([routers.target], *request) for request in requests]
    expected = [merged(reader.events.result(90)) for reader in unfailed]
    readers = [Reader(routers.targets, *request) for request in requests]
    assert all(reader.is_under_way.wait(30) for reader in readers)
    routers.router.kill()
    num_live = sum(not reader.events.done() for reader in readers)
    try:
        for i, reader in enumerate(readers):
            assert merged(reader.events.result(90)) == expected[i], f"request {i}"
        assert num_live == len(requests), "the router died too late to matter"
    finally:
        routers.start_router()
        routers.wait_until_ready()
    routers.wait_until_idle()


def begin(stub: InferenceServiceStub, request_id: str, **metadata: str):
    """A resumable stream that is under way, and what it has brought."""
    request = generate_request([5] * 20, temperature=1.0, seed=4, max_tokens=3000, ignore_eos=True)
    request.request_id, request.resumable = request_id, True
    stream = stub.Generate(request, metadata=tuple(metadata.items()), timeout=120)
    result = Result()
    while len(result.token_ids.get(0, ())) < NUM_BEFORE:
        result.add(next(stream))
    return stream, result


def resume_request(request_id: str, result: Result) -> inference_pb2.ResumeRequest:
    return inference_pb2.ResumeRequest(
        request_id=request_id,
        received=[
            inference_pb2.OutputReceived(
                output_index=index,
                num_tokens=len(token_ids),
                num_text_bytes=len(result.text[index].encode()),
            )
            for index, token_ids in result.token_ids.items()
        ],
    )


def test_a_request_that_nobody_resumes_ends_after_the_grace_period(routers: TwoRouters):
    stream, result = begin(routers.stub, "left")
    stream.cancel()
    assert routers.load().num_requests_running == 1
    routers.wait_until_idle(within_s=20)
    with pytest.raises(grpc.RpcError, match="'left' cannot be resumed") as caught:
        next(routers.other_stub().Resume(resume_request("left", result), timeout=10))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_only_its_tenant_resumes_a_request(routers: TwoRouters):
    stream, result = begin(routers.stub, "mine", **{"x-quire-tenant": "a"})
    request = resume_request("mine", result)
    for stub in (routers.stub, routers.other_stub()):
        for ask in (
            lambda stub=stub: next(stub.Resume(request, metadata=[("x-quire-tenant", "b")])),
            lambda stub=stub: stub.Cancel(inference_pb2.CancelRequest(request_id="mine")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    result.add(next(stream))  # undisturbed
    cancel = inference_pb2.CancelRequest(request_id="mine")
    routers.other_stub().Cancel(cancel, metadata=[("x-quire-tenant", "a")])
    routers.wait_until_idle()


@pytest.mark.parametrize("same_router", [True, False])
def test_the_newest_call_has_the_request(routers: TwoRouters, same_router: bool):
    old, result = begin(routers.stub, "moving")
    stub = routers.stub if same_router else routers.other_stub()
    new = stub.Resume(resume_request("moving", result), timeout=60)
    for _ in range(20):
        result.add(next(new))  # goes on where the old one was, or fails
    if same_router:
        with pytest.raises(grpc.RpcError) as caught:
            list(old)
        assert caught.value.code() is grpc.StatusCode.ABORTED
    else:
        end = next(event.finished for event in old if event.HasField("finished"))
        assert end.error.code == grpc.StatusCode.ABORTED.value[0]
    stub.Cancel(inference_pb2.CancelRequest(request_id="moving"))
    routers.wait_until_idle()


def test_a_caller_that_wants_no_more_ends_the_work_at_once(routers: TwoRouters):
    with Client(routers.targets) as client:
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
        events = client.generate([5, 6], sampling, request_id="closed", resumable=True)
        next(events)
        events.close()
        routers.wait_until_idle(within_s=2)  # less than the grace period

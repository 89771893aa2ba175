"""A stream continues unchanged when its router dies or its connection breaks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.client import Client, SamplingParams
from quire.client.types import BeamSearch, StructuredOutput
from quire.v1 import inference_pb2
from quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.child import START_S, Child, eventually
from tests.e2e.generation import Result, generate_request
from tests.e2e.resuming_reader import NUM_BEFORE, ResumingReader, merged
from tests.e2e.service import Service

NUM_TOKENS = 400
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


class TwoRouters:
    """Two additional routers of the shared service; tests kill the first one."""

    def __init__(self, directory: Path, model: Path, service: Service) -> None:
        directory.mkdir()
        self.service = service
        self.sockets = [directory / name for name in ("first.sock", "second.sock")]
        self.children = [Child("router", Path(f"{socket}.log"), {}) for socket in self.sockets]
        self._flags = [
            "--http-port=0",
            f"--model={model}",
            f"--scheduler=unix:{service.uds['scheduler']}",
        ]

    @property
    def targets(self) -> list[str]:
        return [f"unix:{socket}" for socket in self.sockets]

    def start(self, index: int) -> None:
        self.children[index].start([*self._flags, f"--uds={self.sockets[index]}"])

    def wait_until_ready(self) -> None:
        for child in self.children:
            eventually(
                lambda child=child: self.service.get_json(child, "/ready")[0] == 200 or None,
                "the router is ready",
                START_S,
            )

    @contextlib.contextmanager
    def stub(self, index: int) -> Iterator[InferenceServiceStub]:
        """A stub of a router, on its own connection."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(self.targets[index], options) as channel:
            yield InferenceServiceStub(channel)


@pytest.fixture(scope="module")
def routers(
    service: Service, long_llama: Path, run_dir: Callable[[], Path]
) -> Iterator[TwoRouters]:
    routers = TwoRouters(run_dir(), long_llama, service)
    try:
        for index in range(2):
            routers.start(index)
        routers.wait_until_ready()
        yield routers
        for child in routers.children:
            child.stop()
    finally:
        for child in routers.children:
            child.kill()


def requests_with(stop: str) -> list[tuple[Any, SamplingParams, dict[str, Any]]]:
    """Prompt, sampling and options of every kind of request."""
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
            SamplingParams(max_tokens=200, ignore_eos=True),
            {"n": 2, "beam": BeamSearch(3)},
        ),
    ]


@pytest.fixture(scope="module")
def unfailed(routers: TwoRouters) -> list[tuple[Any, Any]]:
    """Requests of every kind, each with its outputs if nothing dies."""
    first, _ = routers.targets
    text = merged(ResumingReader([first], *requests_with("")[0]).events.result(120))[0][0][2]
    return [
        (request, merged(ResumingReader([first], *request).events.result(120)))
        for request in requests_with(stop=text[-30:-24])
    ]


@pytest.mark.parametrize("what", ["router", "router and scheduler"])
def test_streams_go_on_through_another_router_when_theirs_is_killed(
    routers: TwoRouters, unfailed: list[tuple[Any, Any]], what: str
):
    """If no living process knows a request, its client sends it again."""
    requests, expected = zip(*unfailed, strict=True)
    # A search has no output before its end, so its client may think that it was refused.
    if what != "router":
        requests = requests[:-1]
    with routers.service.holding_steps(routers.children[0], len(requests)):
        readers = [ResumingReader(routers.targets, *request) for request in requests]
    assert all(reader.is_under_way.wait(START_S) for reader in readers)
    routers.children[0].kill()
    if what != "router":
        routers.service.scheduler.kill()
    num_live = sum(not reader.events.done() for reader in readers)
    if what != "router":
        routers.service.start_scheduler()
    routers.start(0)
    for i, reader in enumerate(readers):
        assert merged(reader.events.result(120)) == expected[i], f"request {i}"
    assert num_live, "they died too late to matter"  # a short one may have ended before
    routers.wait_until_ready()
    routers.service.wait_until_ready()
    routers.service.wait_until_idle()


def begin(stub: InferenceServiceStub, request_id: str, **metadata: str):
    """A running resumable stream, and its output so far."""
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


def test_only_its_tenant_resumes_a_request(routers: TwoRouters):
    with routers.stub(0) as first, routers.stub(1) as second:
        stream, result = begin(first, "mine", **{"x-quire-tenant": "a"})
        request = resume_request("mine", result)
        cancel = inference_pb2.CancelRequest(request_id="mine")
        other = [("x-quire-tenant", "b")]
        for stub in (first, second):
            for ask in (
                lambda stub=stub: next(stub.Resume(request, metadata=other)),
                lambda stub=stub: stub.Cancel(cancel, metadata=other),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    ask()
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        result.add(next(stream))  # no other stream is disturbed
        second.Cancel(cancel, metadata=[("x-quire-tenant", "a")])
        routers.service.wait_until_idle()


@pytest.mark.parametrize("index", [0, 1])
def test_the_newest_call_has_the_request(routers: TwoRouters, index: int):
    with routers.stub(0) as first, routers.stub(index) as stub:
        old, result = begin(first, "moving")
        new = stub.Resume(resume_request("moving", result), timeout=60)
        for _ in range(20):
            result.add(next(new))  # continues after the old stream, or fails
        if index == 0:
            with pytest.raises(grpc.RpcError) as caught:
                list(old)
            assert caught.value.code() is grpc.StatusCode.ABORTED
        else:
            end = next(event.finished for event in old if event.HasField("finished"))
            assert end.error.code == grpc.StatusCode.ABORTED.value[0]
        stub.Cancel(inference_pb2.CancelRequest(request_id="moving"))
        routers.service.wait_until_idle()


def test_a_client_whose_connection_broke_comes_back(routers: TwoRouters):
    with routers.stub(0) as stub:
        _, result = begin(stub, "cut")
    with routers.stub(1) as stub:
        new = stub.Resume(resume_request("cut", result), timeout=60)
        for _ in range(20):
            result.add(next(new))
        stub.Cancel(inference_pb2.CancelRequest(request_id="cut"))
    routers.service.wait_until_idle()


def test_a_caller_that_wants_no_more_ends_the_work_at_once(routers: TwoRouters):
    with Client(routers.targets) as client:
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
        events = client.generate([5, 6], sampling, request_id="closed", resumable=True)
        next(events)
        events.close()
        routers.service.wait_until_idle()  # before the grace period ends

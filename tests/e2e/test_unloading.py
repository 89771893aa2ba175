"""Workers unload their models while requests stream, then load the same or other models."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from quire.v1 import inference_pb2
from tests.e2e.child import eventually
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.references import greedy_tokens
from tests.e2e.two_workers import TwoWorkers
from tests.models_fixture import ModelDirs

NUM_TOKENS = 150
PROMPTS = [[5 + (7 * i + j) % 490 for j in range(20 + i)] for i in range(6)]
MODEL_BYTES = 8 * (4 * 512**2 + 3 * 512 * 1536) * 4


@pytest.fixture(scope="module")
def model(model_dirs: ModelDirs) -> Path:
    """A model large enough to be visible in a process's memory."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    return model_dirs.get("llama", **sizes)


@pytest.fixture(scope="module")
def service(model: Path, run_dir: Callable[[], Path]) -> Iterator[TwoWorkers]:
    with TwoWorkers(run_dir(), model, worker=("--num-blocks=256",)) as service:
        service.wait_until_both_are_attached()
        yield service


@pytest.fixture(scope="module")
def expected(service: TwoWorkers) -> list[list[list[int]]]:
    """The outputs without unloading."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [each.result().outputs for each in _start(service, pool)]


def _start(service: TwoWorkers, pool: ThreadPoolExecutor) -> list["Future[Result]"]:
    return [
        pool.submit(
            lambda prompt=prompt: read(
                service.stub.Generate(
                    generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True), timeout=120
                )
            )
        )
        for prompt in PROMPTS
    ]


def _wait_until_tokens_come(service: TwoWorkers) -> None:
    before = service.metrics(service.router)["quire_generation_tokens_total"]

    def come() -> bool | None:
        now = service.metrics(service.router)["quire_generation_tokens_total"]
        return now > before + 5 * len(PROMPTS) or None

    eventually(come, "tokens come")


def test_running_requests_continue_at_the_other_worker(
    service: TwoWorkers, expected: list[list[list[int]]], capsys: pytest.CaptureFixture[str]
):
    first, second = service.targets
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        results = _start(service, pool)
        _wait_until_tokens_come(service)
        assert service.run("unload", first) == 0
        assert f"{first} is unloaded" in capsys.readouterr().out
        assert [each.result().outputs for each in results] == expected
    load = service.load()
    assert (load.num_workers, load.num_unloaded_workers) == (1, 1)
    assert service.metrics(service.worker)["quire_worker_unloaded"] == 1
    status, body = service.get_json(service.worker, "/ready")
    assert (status, body["status"]) == (200, "ready, but its model is unloaded")
    assert service.run("load") == 0
    told = capsys.readouterr().out
    assert f"{first} is loaded" in told
    assert f"{second} was loaded already" in told
    assert service.load().num_workers == 2


def test_what_no_worker_is_left_for_waits_and_loses_nothing(
    service: TwoWorkers, expected: list[list[list[int]]], capsys: pytest.CaptureFixture[str]
):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        results = _start(service, pool)
        _wait_until_tokens_come(service)
        before = service.worker.rss_bytes()
        assert service.run("unload") == 0
        without = service.worker.rss_bytes()
        load = service.load()
        have_ended = [each.done() for each in results]
        assert service.run("load") == 0  # waiting requests have not failed
        assert [each.result().outputs for each in results] == expected
    assert (load.num_workers, load.num_unloaded_workers) == (0, 2)
    assert load.num_requests_waiting == len(PROMPTS)
    assert not any(have_ended)
    assert service.load().num_workers == 2
    after = service.worker.rss_bytes()
    told = [each // 2**20 for each in (before, without, after)]
    assert min(before, after) - without > 0.6 * MODEL_BYTES, told
    told_lines = capsys.readouterr().out.splitlines()
    for target in service.targets:
        # A fast load passes through its statuses between two polls; the first is always reported.
        assert any(line.startswith(f"{target}: ") for line in told_lines), told_lines
        assert f"{target} is loaded" in told_lines
    service.wait_until_idle()


def _listed(service: TwoWorkers) -> list[str]:
    return [m["id"] for m in service.get_json(service.router, "/v1/models")[1]["data"]]


def _outputs(service: TwoWorkers, name: str) -> list[list[int]]:
    request = generate_request(PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True)
    request.model = name
    return read(service.stub.Generate(request, timeout=60)).outputs


def test_they_come_back_with_another_model(
    service: TwoWorkers,
    model: Path,
    model_dirs: ModelDirs,
    expected: list[list[list[int]]],
    capsys: pytest.CaptureFixture[str],
):
    other = model_dirs.get("qwen3", seed=5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_ending, service)
        eventually(lambda: service.load().num_requests_running or None, "it runs")
        assert service.run("unload") == 0
        assert service.run("load", "--model", str(model.parent)) == 1
        assert "config.json" in capsys.readouterr().err
        assert service.load().num_unloaded_workers == 2
        assert service.run("load", "--model", str(other)) == 0
        assert "another model" in waiting.result()
    eventually(lambda: _listed(service) == [other.name] or None, "the other one is listed")
    assert _outputs(service, other.name) == greedy_tokens(other, [PROMPTS[0]], NUM_TOKENS)
    with pytest.raises(grpc.RpcError, match=f"model {model.name!r} is not served"):
        _outputs(service, model.name)

    assert service.run("unload") == 0
    assert service.run("load", "--model", str(model)) == 0
    eventually(lambda: _listed(service) == [model.name] or None, "the first one is listed")
    assert _outputs(service, model.name) == expected[0]


def _ending(service: TwoWorkers) -> str:
    """The end of a request after its model was replaced."""
    request = generate_request(PROMPTS[0], max_tokens=400, ignore_eos=True)
    events = list(service.stub.Generate(request, timeout=120))
    finished = [e.finished for e in events if e.WhichOneof("event") == "finished"]
    assert isinstance(events[0], inference_pb2.GenerateResponse)
    return finished[0].error.message

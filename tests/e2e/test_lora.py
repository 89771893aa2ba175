"""Requests for an adapter get the tokens of merged weights, under any other load."""

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch

from quire.cli.__main__ import main as quire
from quire.v1 import common_pb2, inference_pb2
from tests.e2e.generation import Result, generate_request, read
from tests.e2e.references import Search, greedy_tokens, searched_tokens
from tests.e2e.service import Service
from tests.e2e.two_workers import Stream
from tests.lora_fixture import make_adapter, merge
from tests.models_fixture import ModelDirs

NUM_TOKENS = 96
PROMPTS = [
    torch.randint(5, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (50, 50, 50, 7, 90, 33)
]
MODELS = ("", "sql", "chat")
LATE = "late"
"""An adapter that is loaded at run time."""
CHUNK = 16
SMALL_POOL_BLOCKS = 40
"""Enough for some of the sequences, but not for all."""


@dataclass(frozen=True)
class Case:
    """A model, its adapters, and their merged checkpoints."""

    model: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]
    outputs: dict[str, list[list[int]]]
    """By model name: the outputs of all prompts."""


@pytest.fixture(scope="module")
def case(model_dirs: ModelDirs, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("adapters")
    model = model_dirs.get("llama")
    adapters = {
        "sql": make_adapter(root / "sql", model, seed=1),
        "chat": make_adapter(root / "chat", model, 2, rank=3, targets=("q_proj", "v_proj")),
        LATE: make_adapter(root / LATE, model, seed=3),
    }
    merged = {"": model}
    merged |= {name: merge(root / f"merged-{name}", model, adapters[name]) for name in adapters}
    outputs = {name: greedy_tokens(merged[name], PROMPTS, NUM_TOKENS) for name in (*MODELS, LATE)}
    return Case(model, adapters, merged, outputs)


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two_ranks"])
def service(
    request: pytest.FixtureRequest, case: Case, run_dir: Callable[[], Path]
) -> Iterator[Service]:
    worker = [f"--lora={name}={case.adapters[name]}" for name in ("sql", "chat")]
    worker.append(f"--tensor-parallel-size={request.param}")
    worker += [f"--num-blocks={SMALL_POOL_BLOCKS}", "--served-model-name=tiny"]
    scheduler = [f"--max-prefill-chunk={CHUNK}"]
    router = ["--served-model-name=tiny", "--local-drain"]
    with Service(
        run_dir(), case.model, worker=worker, scheduler=scheduler, router=router
    ) as service:
        yield service


def _request(prompt: list[int], model: str, **options: int) -> inference_pb2.GenerateRequest:
    request = generate_request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    request.model = model
    return request


def _read_all(service: Service, requests: list[inference_pb2.GenerateRequest]) -> list[Result]:
    with ThreadPoolExecutor(len(requests)) as pool:
        streams = [
            pool.submit(lambda r=request: read(service.stub.Generate(r, timeout=120)))
            for request in requests
        ]
        return [stream.result() for stream in streams]


def _running(service: Service, requests: list[inference_pb2.GenerateRequest]) -> list[Stream]:
    """Start streams; returns when the first one runs."""
    streams = [Stream(service, request) for request in requests]
    streams[0].read_until(1)
    return streams


def test_all_prompts_under_all_models_at_once_with_preemption(service: Service, case: Case):
    chosen = [(i, name) for i in range(len(PROMPTS)) for name in MODELS]
    results = _read_all(service, [_request(PROMPTS[i], name) for i, name in chosen])
    wrong = [
        f"prompt {i} of {name!r}"
        for (i, name), result in zip(chosen, results, strict=True)
        if result.outputs != [case.outputs[name][i]]
    ]
    assert not wrong
    assert service.metrics(service.scheduler)["quire_num_preemptions_total"] > 0
    service.wait_until_idle()


def test_the_prefix_cache_is_each_models_own(service: Service, case: Case):
    prompt = [11] * 49
    for num_cached in (0, 48):
        for name in MODELS:
            result = read(service.stub.Generate(_request(prompt, name, n=2), timeout=60))
            assert result.usage is not None
            assert result.usage.cached_tokens == num_cached, name
            (expected,) = greedy_tokens(case.merged[name], [prompt], NUM_TOKENS)
            assert result.outputs == [expected] * 2


def test_a_beam_search_is_the_adapters(service: Service, case: Case):
    request = _request(PROMPTS[3], "sql")
    request.beam.width = 3
    request.sampling.max_tokens = 20
    (result,) = _read_all(service, [request])
    search = Search(tuple(PROMPTS[3]), width=3, n=1, num_tokens=20)
    assert [result.outputs] == searched_tokens(case.merged["sql"], [search])


def test_it_goes_on_with_the_adapter_after_the_death_of_the_scheduler(service: Service, case: Case):
    service.wait_until_idle()
    streams = _running(service, [_request(PROMPTS[4], name) for name in MODELS])
    service.scheduler.kill()
    service.start_scheduler()
    outputs = [stream.read_to_end() for stream in streams]
    assert outputs == [[case.outputs[name][4]] for name in MODELS]
    service.wait_until_ready()


def test_models_are_listed_with_the_one_they_belong_to(service: Service):
    _, body = service.get_json(service.router, "/v1/models")
    assert [(m["id"], m.get("parent")) for m in body["data"]] == [
        ("tiny", None),
        ("chat", "tiny"),
        ("sql", "tiny"),
    ]
    listed = service.stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert [(m.id, m.parent) for m in listed] == [("tiny", ""), ("chat", "tiny"), ("sql", "tiny")]
    assert service.get_json(service.router, "/v1/models/sql")[1]["parent"] == "tiny"


def test_http_chooses_by_the_models_name(service: Service, case: Case):
    options = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    for name in ("tiny", "sql"):
        body = {"model": name, "prompt": PROMPTS[0], **options}
        answer = service.post_json("/v1/completions", body)
        assert answer["model"] == name
        expected = case.outputs["" if name == "tiny" else name][0][:48]
        text = service.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=expected)).text
        assert answer["choices"][0]["text"] == text


def test_an_unknown_adapter_is_not_found(service: Service):
    with pytest.raises(urllib.error.HTTPError) as caught:
        service.post_json("/v1/completions", {"model": "sq", "prompt": "x"})
    assert caught.value.code == 404
    error = json.loads(caught.value.read())["error"]
    assert error["message"] == "model 'sq' is not served; 'tiny', 'chat', 'sql' are"


def test_an_adapter_is_chosen_by_model_alone(service: Service):
    sampling = common_pb2.SamplingParams(adapter=common_pb2.LoraAdapter(name="sql"))
    request = inference_pb2.GenerateRequest(text="x", sampling=sampling)
    with pytest.raises(grpc.RpcError, match=r"sampling\.adapter is set; name the adapter in model"):
        read(service.stub.Generate(request, timeout=30))


def _post_text(service: Service, path: str, **body: str) -> str:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{service.url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def _listed(service: Service) -> list[str]:
    return [m["id"] for m in service.get_json(service.router, "/v1/models")[1]["data"]]


def _refused(service: Service, model: str) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        read(service.stub.Generate(_request(PROMPTS[3], model), timeout=30))
    return caught.value.code()


def test_an_adapter_comes_and_goes_while_others_stream(
    service: Service, case: Case, capsys: pytest.CaptureFixture[str]
):
    directory = case.adapters[LATE]
    scheduler = ["--scheduler", f"unix:{service.uds['scheduler']}"]
    assert _refused(service, LATE) is grpc.StatusCode.NOT_FOUND
    others = _running(service, [_request(PROMPTS[0], name) for name in MODELS])
    told = _post_text(service, "/v1/load_lora_adapter", lora_name=LATE, lora_path=str(directory))
    assert told == "Success: LoRA adapter 'late' added successfully."
    assert _listed(service) == ["tiny", "chat", "late", "sql"]
    (result,) = _read_all(service, [_request(PROMPTS[1], LATE)])
    assert result.outputs == [case.outputs[LATE][1]]
    assert [each.read_to_end() for each in others] == [[case.outputs[name][0]] for name in MODELS]

    # The next scheduler learns about the adapter from the worker.
    (going_on,) = _running(service, [_request(PROMPTS[4], LATE)])
    service.scheduler.kill()
    service.start_scheduler()
    assert going_on.read_to_end() == [case.outputs[LATE][4]]
    service.wait_until_ready()
    assert _listed(service) == ["tiny", "chat", "late", "sql"]

    # A restarted worker gets the adapter, too: the scheduler knows its directory.
    service.worker.kill()
    service.start_worker()
    (result,) = _read_all(service, [_request(PROMPTS[2], LATE)])
    assert result.outputs == [case.outputs[LATE][2]]
    capsys.readouterr()
    assert quire(["lora", *scheduler]) == 0
    assert f"late  {_digest(directory)}  {directory}" in capsys.readouterr().out

    (last,) = _running(service, [_request(PROMPTS[5], LATE)])
    _post_text(service, "/v1/unload_lora_adapter", lora_name=LATE)
    assert last.read_to_end() == [case.outputs[LATE][5]]
    assert _listed(service) == ["tiny", "chat", "sql"]
    assert _refused(service, LATE) is grpc.StatusCode.NOT_FOUND
    assert quire(["lora", "load", f"{LATE}={directory.parent}", *scheduler]) == 1
    assert "adapter_config.json" in capsys.readouterr().err


def _digest(directory: Path) -> str:
    parts = [
        hashlib.sha256((directory / name).read_bytes()).digest()
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:8]

"""`LLM` starts a service that has the usual outputs, and ends with the program."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from contract.errors import InvalidArgumentError, UnauthenticatedError
from quire import LLM, SamplingParams, StructuredOutput
from quire.cli.up.service_dir import running_services
from quire.client import Client
from quire.private_service import ServiceStartError
from tests.e2e.child import START_S, STOP_S, eventually
from tests.e2e.service import Service

PROGRAM = Path(__file__).parent / "offline_program.py"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(long_llama: Path) -> Iterator[LLM]:
    flags = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_blocks": 256}
    with LLM(model=long_llama, **flags) as llm:
        yield llm


def test_results_are_the_services_in_the_order_of_the_prompts(llm: LLM, service: Service) -> None:
    prompts = ["one", [5, 6, 7], "a much longer prompt than the others", "one"]
    sampling = [
        GREEDY,
        SamplingParams(seed=3, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=1, logprobs=2),
        SamplingParams(seed=4, max_tokens=30, ignore_eos=True),
    ]
    generations = llm.generate(prompts, sampling, n=2, progress=False)
    assert [generation.prompt for generation in generations] == prompts
    with Client(service.target) as client:
        for generation, params in zip(generations, sampling, strict=True):
            expected = client.generate_once(generation.prompt, params, n=2)
            assert [output.token_ids for output in generation.outputs] == [
                output.token_ids for output in expected.outputs
            ]
            assert [(o.text, o.finish_reason) for o in generation.outputs] == [
                (o.text, o.finish_reason) for o in expected.outputs
            ]
            assert generation.usage.completion_tokens == expected.usage.completion_tokens
    assert generations[0].outputs[0].finish_reason == "length"
    assert len(generations[2].outputs[0].logprobs[0].top) == 2


def test_vectors_are_the_services(llm: LLM, service: Service) -> None:
    vectors = llm.embed(["one", [5, 6, 7]], dimensions=8)
    assert vectors.shape == (2, 8)
    with Client(service.target) as client:
        expected = client.embed(["one", [5, 6, 7]], dimensions=8)
    np.testing.assert_allclose(vectors, expected.vectors, atol=1e-6)
    assert expected.usage.completion_tokens == 0


def test_a_service_with_a_key_obeys_its_owner_alone(long_llama: Path) -> None:
    with LLM(model=long_llama, api_key="a-key", simulate=1, num_blocks=64) as llm:
        assert len(llm.generate(["one", "two"], GREEDY, progress=False)) == 2
        with Client(llm._service.target) as client, pytest.raises(UnauthenticatedError):
            client.generate_once("one", GREEDY)


def test_one_prompt_may_be_text_or_token_ids(llm: LLM) -> None:
    by_text, by_ids = (llm.generate(prompt, GREEDY, progress=False) for prompt in ("one", [9, 8]))
    assert [g.prompt for g in by_text + by_ids] == ["one", [9, 8]]
    assert llm.generate([], progress=False) == []


def test_an_output_may_have_a_form(llm: LLM) -> None:
    form = StructuredOutput(choice=("yes", "no"))
    (generation,) = llm.generate("is it?", SamplingParams(structured=form), progress=False)
    assert generation.outputs[0].text in form.choice
    assert generation.outputs[0].finish_reason == "stop"


def test_a_bad_prompt_is_named_and_the_others_are_cancelled(llm: LLM) -> None:
    long = SamplingParams(max_tokens=4000, ignore_eos=True)
    bad = SamplingParams(temperature=-1)
    with pytest.raises(InvalidArgumentError, match=r"^prompts\[2\]\.sampling\.temperature is -1"):
        llm.generate(["a", "b", "c"], [long, long, bad], progress=False)
    with Client(llm._service.target) as client:
        eventually(lambda: client.load().num_requests_running == 0 or None, "they are cancelled")
    with pytest.raises(InvalidArgumentError, match="has 1 entries; there are 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_progress_is_shown_on_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""


async def test_it_works_within_an_event_loop(llm: LLM) -> None:
    assert len(llm.generate("as in a notebook", GREEDY, progress=False)) == 1


def test_a_failed_start_reports_its_reason() -> None:
    with pytest.raises(ServiceStartError, match="there is no such directory or GGUF file"):
        LLM(model="/nowhere")
    with pytest.raises(ServiceStartError, match=r"error: .*--nonsense"):
        LLM(nonsense=1)
    with pytest.raises(TypeError, match="LLM sets detach, uds itself"):
        LLM(uds="x", detach=True)


@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])  # SIGINT raises, like any other exception
def test_however_the_program_ends_no_process_is_left(
    end: str, long_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("o")
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(long_llama)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "up\n", program.communicate()[1]
    (service,) = running_services(folder / f"quire-{os.getuid()}")
    pids = [service.pid, *(process.pid for process in service.processes if process.pid)]
    assert len(pids) == 4
    with Client(service.grpc_target) as client:
        eventually(lambda: client.load().num_requests_running or None, "it works", START_S)
    program.send_signal(signal.Signals[end])
    _, errors = program.communicate(timeout=STOP_S)
    assert ("KeyboardInterrupt" in errors) == (end == "SIGINT")
    assert program.returncode != 0
    eventually(lambda: not any(map(is_alive, pids)) or None, "they have ended", STOP_S)


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not run; its parent has not reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""The closed-loop clients of `bench/` use the OpenAI API."""

import importlib
from pathlib import Path

import pytest
from openai_fakes import delta, play, spell

from contract.errors import TooBusyError, UnavailableError
from contract.outputs import FinishReason

BENCH = Path(__file__).parents[4] / "bench"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("harness.closed_loop")


@pytest.fixture
def base_url(server):
    return "http://{}:{}".format(*server)


async def test_it_counts_every_token_and_sends_what_it_says(load, base_url, inference, capsys):
    inference.script = lambda request: spell(
        "é" * request.sampling.max_tokens, FinishReason.LENGTH
    )(request)
    workload = load.Workload("org/tiny", num_prompts=10, input_len=5, output_len=20, vocab_size=50)
    result = await load.run_load(base_url, workload, concurrency=4)

    warm_up, measured = inference.requests[:4], inference.requests[4:]
    assert {request.sampling.max_tokens for request in warm_up} == {8}
    assert len(measured) == 10
    for request in measured:
        assert len(request.prompt) == 5
        assert max(request.prompt) < 50
        assert request.sampling.ignore_eos
    assert len({request.prompt for request in inference.requests}) == 14, "no prompt twice"

    assert result.num_output_tokens == 200
    assert result.output_tok_s == pytest.approx(200 / result.duration_s)
    assert 0 < result.ttft_p50_ms <= result.ttft_p99_ms <= result.duration_s * 1e3
    assert 0 < result.tpot_mean_ms * 19 <= result.duration_s * 1e3

    assert result.metrics()["output_tok_s_c4"] == result.output_tok_s
    load.print_loads([result])
    assert len({len(line) for line in capsys.readouterr().out.splitlines()}) == 1


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([TooBusyError("the queue is full")], "status 429: .*the queue is full"),
        ([delta("a"), UnavailableError("lost")], "stream broken: .*lost"),
    ],
)
async def test_a_failure_ends_the_run(load, base_url, inference, events, message):
    inference.script = play(events)
    workload = load.Workload("org/tiny", num_prompts=2, input_len=5, output_len=2)
    with pytest.raises(load.BenchError, match=message):
        await load.run_load(base_url, workload, concurrency=1)


async def test_it_finds_the_model(load, base_url):
    assert await load.find_model(base_url) == "org/tiny"

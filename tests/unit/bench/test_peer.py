"""`bench/serve.py` compares with other servers in turns, by ratios within a round."""

import contextlib
import json
import sys

import pytest
from aiohttp import web

NUM_TOKENS = 4


class FakeServer:
    """An OpenAI-shaped server that answers any prompt with as many tokens as it asks for."""

    def __init__(self, name, taken):
        self._name = name
        self._taken = taken

    async def list_models(self, _):
        return web.json_response({"data": [{"id": f"model of {self._name}"}]})

    async def complete(self, request):
        body = await request.json()
        assert body["model"] == f"model of {self._name}"
        if body["max_tokens"] == NUM_TOKENS:
            self._taken.append((self._name, tuple(body["prompt"])))
        response = web.StreamResponse()
        await response.prepare(request)
        for index in range(body["max_tokens"]):
            reason = "length" if index + 1 == body["max_tokens"] else None
            choice = {"text": "a", "finish_reason": reason}
            await self._send(response, {"choices": [choice]})
        await self._send(
            response, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response, chunk):
        text = json.dumps(chunk, separators=(",", ":"))
        await response.write(f"data: {text}\n\n".encode())


@contextlib.asynccontextmanager
async def fake_server(name, taken):
    fake = FakeServer(name, taken)
    app = web.Application()
    app.router.add_get("/v1/models", fake.list_models)
    app.router.add_post("/v1/completions", fake.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def parse(monkeypatch, *flags):
    import serve  # noqa: PLC0415

    monkeypatch.setattr(sys, "argv", ["serve.py", *flags])
    return serve._parse()


async def test_several_peers_take_turns_with_our_server_and_have_results_by_name(
    monkeypatch, capsys
):
    import serve  # noqa: PLC0415

    monkeypatch.setattr("harness.closed_loop._WARM_UP_OUTPUT_LEN", 1)
    taken = []
    async with (
        fake_server("ours", taken) as ours,
        fake_server("a", taken) as a,
        fake_server("b", taken) as b,
    ):
        given = parse(
            monkeypatch,
            *("--base-url", ours, "--peer", f"vllm={a}", "--peer", f"other_1={b}"),
            *("--quick", "--rounds", "2", "--concurrency", "1,2"),
            *("--input-len", "3", "--output-len", str(NUM_TOKENS)),
        )
        metrics = await serve.measure(given)
    sides = [name for name, _ in taken]
    assert sides[:6] == ["ours", "a", "b", "b", "a", "ours"]
    assert sides[6:] == [side for side in sides[:6] for _ in range(2)], "two streams"
    prompts = [prompt for _, prompt in taken]
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]
    names = [
        f"{n}_{p}_c{c}" for n in serve._PEER_RATIOS for p in ("vllm", "other_1") for c in (1, 2)
    ]
    assert {f"{name}{end}" for name in names for end in ("", "_min", "_max")} == {
        name for name in metrics if name.startswith("peer")
    }
    assert metrics["output_tok_s_c2"] > 0
    out = capsys.readouterr().out
    assert out.index("ours ÷ vllm:") < out.index("peer_ratio_vllm_c1")
    assert out.index("peer_ratio_vllm_c2") < out.index("ours ÷ other_1:")


def test_a_lone_peer_needs_no_name(monkeypatch):
    from serve import Peer  # noqa: PLC0415

    given = parse(monkeypatch, "--peer", "http://h:1/v?a=b")
    assert given.peer == [Peer("", "http://h:1/v?a=b")]
    assert given.rounds == 5
    assert parse(monkeypatch).rounds == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--peer=a=h:1"], "a=h:1: must be URL or NAME=URL"),
        (["--peer=A b=http://h"], "must be URL or NAME=URL"),
        (["--peer=http://h:1", "--peer=a=http://h:2"], "http://h:1: several need names"),
        (["--peer=a=http://h:1", "--peer=a=http://h:2"], "--peer: a: several need names"),
        (["--peer=a=http://h:1", "--peer=b=http://h:1"], "http://h:1: all compared servers"),
        (["--peer=http://h:1", "--base-url=http://h:1"], "http://h:1: all compared servers"),
    ],
)
def test_peers_that_cannot_be_told_apart_are_refused(monkeypatch, capsys, flags, reason):
    with pytest.raises(SystemExit):
        parse(monkeypatch, *flags)
    assert reason in capsys.readouterr().err


def result(output_tok_s, ttft_mean_ms, itl_p99_ms, concurrency=8):
    from harness.closed_loop import LoadResult  # noqa: PLC0415

    return LoadResult(
        concurrency=concurrency,
        num_output_tokens=64,
        duration_s=1.0,
        output_tok_s=output_tok_s,
        ttft_mean_ms=ttft_mean_ms,
        ttft_p50_ms=ttft_mean_ms,
        ttft_p99_ms=ttft_mean_ms,
        tpot_mean_ms=1.0,
        itl_p99_ms=itl_p99_ms,
    )


async def test_sides_take_turns_on_the_same_prompts_and_every_other_round_in_reverse(
    monkeypatch, capsys
):
    import serve  # noqa: PLC0415
    from harness.closed_loop import Workload  # noqa: PLC0415

    taken = []
    results = {
        "ours": iter([result(10, 50, 8), result(30, 40, 9), result(12, 60, 7)]),
        "theirs": iter([result(5, 100, 16), result(10, 100, 9), result(12, 120, 14)]),
    }

    async def find_model(url):
        return f"model of {url}"

    async def run_load(url, workload, concurrency):
        taken.append((url, workload.model, workload.seed - serve._FIRST_SEED - 1, concurrency))
        return next(results[url])

    monkeypatch.setattr(serve, "find_model", find_model)
    monkeypatch.setattr(serve, "run_load", run_load)
    workload = Workload("m", 4, 8, 8, seed=6)
    peers = [serve.Peer("", "theirs")]
    (loads,) = await serve.measure_loads("ours", peers, {8: workload}, 3)
    assert taken == [
        (url, f"model of {url}", seed, 8)
        for url, seed in zip(
            ["ours", "theirs", "theirs", "ours", "ours", "theirs"], [0, 0, 1, 1, 2, 2], strict=True
        )
    ]
    metrics = loads.metrics()
    assert metrics["output_tok_s_c8"] == 12
    assert [metrics[f"peer_ratio_c8{end}"] for end in ("", "_min", "_max")] == [2, 1, 3]
    assert metrics["peer_ttft_ratio_c8"] == 0.5
    assert metrics["peer_itl_p99_ratio_c8"] == 0.5
    assert "peer_ratio_c8            2.000  (1.000 … 3.000)" in capsys.readouterr().out


async def test_without_a_peer_there_is_nothing_to_compare():
    from harness.closed_loop import median_of  # noqa: PLC0415
    from serve import Rounds  # noqa: PLC0415

    loads = Rounds([result(10, 50, 8), result(20, 40, 9)], {})
    assert median_of(loads.ours) == result(15, 45, 8.5)
    assert loads.metrics()["output_tok_s_c8"] == 15, "whole numbers stay whole, in names, too"
    assert not any("peer" in name for name in loads.metrics())

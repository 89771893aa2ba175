"""`bench/serve.py` compares with another server in turns, by ratios within a round."""


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
    (loads,) = await serve.measure_loads("ours", "theirs", {8: workload}, 3)
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

    loads = Rounds([result(10, 50, 8), result(20, 40, 9)], [])
    assert median_of(loads.ours) == result(15, 45, 8.5)
    assert loads.metrics()["output_tok_s_c8"] == 15, "whole numbers stay whole, in names, too"
    assert not any("peer" in name for name in loads.metrics())
    assert not loads.ratios()

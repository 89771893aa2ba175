"""The benchmarks' harness: turns and their ratios, tables, the command line, the clock."""

import json
import random
import sys

import pytest


def test_every_other_round_is_in_reverse_and_warm_ups_count_below_zero():
    from harness.turns import turns  # noqa: PLC0415

    taken = list(turns("ab", 2, warm_ups=1))
    assert taken == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_ratios_are_taken_within_rounds():
    from harness.turns import Spread  # noqa: PLC0415

    spread = Spread.of_ratios([10, 30, 12], [5, 10, 12])
    assert spread == Spread(2, 1, 3)
    assert str(spread) == "2.000  (1.000 … 3.000)"
    assert spread.metrics("r") == {"r": 2, "r_min": 1, "r_max": 3}


def test_a_table_has_text_left_numbers_right_and_empty_cells(capsys):
    from harness.case import Table  # noqa: PLC0415

    table = Table("tier:<6", "blocks:,d", "share:.1%")
    table.row("host", 1234, 0.5)
    table.row("disk", None, 1.0)
    assert capsys.readouterr().out.splitlines() == [
        "tier      blocks     share",
        "host       1,234     50.0%",
        "disk                100.0%",
    ]


def test_json_has_the_numbers_and_the_machine_which_is_printed_first(tmp_path, monkeypatch, capsys):
    def measure(given):
        print("measured")  # noqa: T201
        return {"ratio": 1 / 3, "quick": given.quick}

    from harness.case import arguments, main  # noqa: PLC0415

    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["x.py", "--quick", "--json", str(file)])
    given = arguments("Measures.", quick="less").parse_args()
    assert main(given, measure)["quick"] is True
    written = json.loads(file.read_text())
    assert written["ratio"] == 0.33333
    machine = written["machine"]
    assert {"date", "cpu", "instruction_sets", "cores", "numpy", "commit"} <= set(machine)
    head, *rest = capsys.readouterr().out.splitlines()
    assert rest == ["measured"]
    for name in "cpu", "cpu_family_model", "instruction_sets", "cores", "date":
        assert str(machine[name]) in head


def test_the_head_names_a_cpu_and_what_it_can_multiply():
    from harness.machine import headline, machine_facts  # noqa: PLC0415

    xeon = {"model name": "Xeon", "cpu family": "6", "model": "143"}
    xeon["flags"] = "fpu avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 amx_int8 amx_tile"
    head = headline(machine_facts(xeon) | {"cores": 4, "date": "2026-01-02"})
    assert head == (
        "Xeon (6/143), 4 cores, avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8;"
        " 2026-01-02"
    )
    arm = {"Features": "fp asimd bf16 i8mm", "CPU implementer": "0x41", "CPU part": "0xd4f"}
    head = headline(machine_facts(arm) | {"cpu": "aarch64", "cores": 8, "date": "2026-01-02"})
    assert head == "aarch64 (0x41/0xd4f), 8 cores, neon bf16 i8mm; 2026-01-02"


def test_a_reader_of_json_never_sees_a_part_of_it(tmp_path):
    from harness.case import write_json  # noqa: PLC0415

    file = tmp_path / "out.json"
    write_json(file, {"a": 1})
    with file.open() as reader:
        write_json(file, {"a": 2})
        assert json.load(reader)["a"] == 1
    assert json.loads(file.read_text())["a"] == 2
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_measurement_ends_the_script_with_its_reason(monkeypatch):
    from harness.case import BenchError, arguments, main  # noqa: PLC0415

    async def measure(_):
        raise BenchError("the server refuses")

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit, match=r"x\.py: the server refuses"):
        main(arguments("Measures.", quick="less").parse_args(), measure)


def test_help_shows_the_docstring_and_defaults(capsys):
    from harness.case import arguments  # noqa: PLC0415

    parser = arguments("Measures.\n\n    python x.py", quick="less")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side")
    parser.print_help()
    text = capsys.readouterr().out
    assert "    python x.py" in text
    assert "rounds of each side (default: 3)" in text
    assert "None" not in text
    assert "False" not in text


def test_a_clock_runs_events_in_order_of_time_then_of_setting():
    from harness.device import Clock  # noqa: PLC0415

    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append((clock.now, "b")))
    clock.at(1.0, lambda: clock.at(2.0, lambda: seen.append((clock.now, "c"))))
    clock.run()
    assert seen == [(2.0, "b"), (2.0, "c")]


def test_an_answerer_takes_json_and_its_end_is_an_error():
    from harness.case import BenchError  # noqa: PLC0415
    from harness.processes import Answerer  # noqa: PLC0415

    doubles = "import json; print(json.dumps(2 * json.loads(input())), flush=True)"
    with Answerer(sys.executable, "-c", doubles) as answerer:
        assert answerer.ask([1]) == [1, 1]
        with pytest.raises(BenchError, match="no answer"):
            answerer.ask([2])


async def test_slots_share_the_items_and_the_first_error_is_raised():
    from harness.case import BenchError  # noqa: PLC0415
    from harness.closed_loop import in_parallel  # noqa: PLC0415

    seen = []

    async def send(item):
        seen.append(item)
        if item == 3:
            raise BenchError("status 500")

    with pytest.raises(BenchError, match="status 500"):
        await in_parallel(range(100), 2, send)
    assert seen[:4] == [0, 1, 2, 3]


def test_a_simulated_worker_decodes_to_the_end_or_to_its_stop():
    import numpy as np  # noqa: PLC0415
    from harness.device import SimulatedWorker  # noqa: PLC0415

    from scheduler_svc.core.interface.config import SchedulerConfig  # noqa: PLC0415
    from scheduler_svc.core.interface.request import Request, SeqKey, SourceId  # noqa: PLC0415
    from scheduler_svc.core.scheduler import Scheduler  # noqa: PLC0415

    core = Scheduler(
        SchedulerConfig(
            num_blocks=64,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            max_model_len=32,
            enable_prefix_caching=False,
        )
    )
    stops = {b"stops": 12, b"ends": 99}
    worker = SimulatedWorker(
        2, draw=lambda _, index: index, stop_at=lambda new: stops[bytes(new.sampling)]
    )
    for key, name in enumerate(stops):
        prompt = np.zeros(10, np.int32)
        core.submit(Request(SourceId(0), SeqKey(key), "", prompt, 1, 5, name), 0.0)
    tokens = {0: [], 1: []}
    while (plan := core.schedule(0.0)) is not None:
        news = core.update(worker.execute(plan))
        for key, token in zip(news.seq_keys.tolist(), news.token_ids.tolist(), strict=True):
            tokens[key].append(token)
    assert tokens == {0: [10, 11], 1: [10, 11, 12, 13, 14]}


def test_drawn_lengths_lie_within_their_bounds_and_short_ones_are_more_frequent():
    from harness.open_loop import lengths  # noqa: PLC0415

    chance = random.Random(0)
    drawn = [lengths(chance, (32, 512)) for _ in range(200)]
    assert 32 <= min(drawn) < max(drawn) <= 512
    assert sum(each < 128 for each in drawn) > 80


async def test_a_refused_arrival_is_a_bench_error(monkeypatch):
    from harness import closed_loop, open_loop  # noqa: PLC0415
    from harness.case import BenchError  # noqa: PLC0415

    async def refuse(*_):
        raise BenchError("status 500")

    monkeypatch.setattr(closed_loop, "post_stream", refuse)
    arrivals = open_loop.Arrivals(1000.0, 0.01, (1, 2), (1, 2))
    with pytest.raises(BenchError, match="status 500"):
        await open_loop.run_arrivals("http://localhost", "m", arrivals)

"""`quire top`: its figures, its frames, and its end."""

import asyncio
import io
import os
import pty
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from contract.errors import UnavailableError
from quire.cli.__main__ import main
from quire.cli.commands.observe import top
from quire.cli.top.figures import Snapshot, parse_metrics, rates_between, sum_tiers
from quire.cli.top.view import bar, draw
from quire.client import Client
from quire.client.types import Load
from quire.v1 import common_pb2, kv_pb2

LOAD = Load(
    num_requests_running=2,
    num_requests_waiting=5,
    max_num_seqs=8,
    num_blocks=10,
    num_free_blocks=1,
    num_cached_blocks=2,
    block_size=16,
    num_workers=1,
    num_requests_swapped=1,
)
METRICS = """
# TYPE quire_requests_refused counter
quire_requests_refused_total{code="RESOURCE_EXHAUSTED"} 4.0
quire_requests_refused_total{code="NOT_FOUND"} 0.0
# TYPE quire_time_to_first_token_seconds histogram
quire_time_to_first_token_seconds_bucket{le="0.1"} 1.0
quire_time_to_first_token_seconds_bucket{le="+Inf"} 2.0
quire_time_to_first_token_seconds_count 2.0
quire_time_to_first_token_seconds_sum 0.5
"""


def activity(worker="w", **fields):
    return common_pb2.WorkerActivity(
        worker=worker, **{"attached_at_s": 1.0, "busy_s": 0.5} | fields
    )


def sequence(request_id, num_device_blocks):
    return kv_pb2.SequenceKv(
        seq_id=1,
        request_id=request_id,
        status=kv_pb2.SEQUENCE_STATUS_DECODE,
        num_tokens=20,
        num_prompt_tokens=10,
        num_device_blocks=num_device_blocks,
    )


def worker_kv(worker, *sequences, host=0):
    kv = kv_pb2.WorkerKv(worker=worker, block_size=16, block_bytes=2**20, sequences=sequences)
    kv.tiers.add(
        tier=kv_pb2.KV_TIER_DEVICE,
        num_blocks=10,
        num_held=3,
        num_shared=1,
        num_cached=2,
        num_pinned=1,
        num_free=3,
    )
    if host:
        kv.tiers.add(tier=kv_pb2.KV_TIER_HOST, num_blocks=host, num_free=host)
    return kv


def frame(now, before=None, *, height=60, width=150) -> str:
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(draw(console, "title", before or now, now))
    return console.export_text()


async def run(*argv):
    return await asyncio.to_thread(main, argv)


async def test_once_prints_a_frame_with_rates(served, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    flags = ("--once", "--interval-s", "0.01", "--target", served.target)
    assert await run("top", *flags) == 0
    output = capsys.readouterr().out
    assert "running 2 of 0" in output
    assert "25%" in output  # fragmentation, and hits of the prefix cache
    assert "w.sock" in output
    assert "r[1]" in output
    assert served.fake.num_activity_calls == 2
    kv = [request.query for request in served.fake.requests if hasattr(request.query, "max_blocks")]
    assert [query.max_blocks for query in kv] == [0, 0]


async def test_a_tenant_sees_the_load_alone(served, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    served.fake.is_for_tenants = True
    assert await run("top", "--once", "--interval-s=0.01", "--target", served.target) == 0
    output = capsys.readouterr().out
    assert "this call is for operators" in output
    assert "running 2" in output


async def test_a_router_that_is_not_there_is_one_line(capsys):
    assert await run("top", "--once", "--target", "unix:/nowhere/at/all") == 1
    assert "quire: nothing answers at unix:/nowhere/at/all" in capsys.readouterr().err


async def test_client_gives_what_the_workers_do(served):
    with Client(served.target) as client:
        (worker,) = await asyncio.to_thread(client.describe_activity, max_steps=3)
    assert (worker.num_steps, worker.num_preemptions) == (10, 3)
    assert [step.num_decode_tokens for step in worker.steps] == [4, 4, 4]
    assert served.fake.requests[-1].query.max_steps == 3


def test_rates_are_of_the_time_between():
    before = Snapshot(10.0, LOAD, activity=(activity(num_steps=5), activity("gone")))
    now = Snapshot(
        12.0, LOAD, activity=(activity(num_steps=25, num_decode_tokens=80), activity("new"))
    )
    rates = rates_between(before, now)
    assert rates.keys() == {"w"}
    assert (rates["w"].steps, rates["w"].decode_tokens, rates["w"].busy) == (10.0, 40.0, 0.0)


def test_totals_that_were_reset_have_no_rate():
    before = Snapshot(10.0, LOAD, activity=(activity(num_steps=50),))
    now = Snapshot(12.0, LOAD, activity=(activity(num_steps=3, attached_at_s=11.0),))
    assert rates_between(before, now) == {}


def test_tiers_are_added_up_over_the_workers():
    device, host = sum_tiers([worker_kv("a", host=4), worker_kv("b")])
    assert (device.num_blocks, device.num_held, device.num_bytes) == (20, 6, 20 * 2**20)
    assert (host.tier, host.num_blocks) == (kv_pb2.KV_TIER_HOST, 4)


@pytest.mark.parametrize(
    ("counts", "cells"),
    [
        ({"held": 1, "cached": 0, "free": 1}, "█████░░░░░"),
        ({"held": 1, "cached": 1, "free": 10_000}, "██░░░░░░░░"),  # a small share is still visible
        ({"shared": 1, "held": 1, "cached": 1}, "██████████"),
        ({"held": 0, "free": 0}, ""),
    ],
)
def test_a_bar_has_its_width_and_every_state(counts, cells):
    assert bar(counts, width=10).plain == cells


def test_metrics_count_refusals_and_time_first_tokens():
    figures = parse_metrics(METRICS)
    assert figures.code_to_num_refused == {"RESOURCE_EXHAUSTED": 4}
    assert (figures.first_token_s, figures.num_first_tokens) == (0.5, 2)
    assert figures.num_between_tokens == 0


def test_new_refusals_are_marked():
    then = parse_metrics(METRICS)
    now = replace(
        then,
        code_to_num_refused={"RESOURCE_EXHAUSTED": 7},
        first_token_s=0.9,
        num_first_tokens=4,
    )
    text = frame(Snapshot(2.0, LOAD, router=now), Snapshot(1.0, LOAD, router=then))
    assert "RESOURCE_EXHAUSTED 7 (+3)" in text
    assert "first token 200.0 ms" in text


def test_the_largest_sequences_fill_what_is_left_of_the_screen():
    kv = worker_kv("w", *(sequence(f"job-{i}", i) for i in range(40)))
    text = frame(Snapshot(1.0, LOAD, (kv,), (activity(),)), height=30)
    assert len(text.splitlines()) <= 30
    assert "job-39" in text
    assert "job-0 " not in text


def test_names_of_others_are_not_markup():
    kv = worker_kv("[red]w", sequence("[bold]evil[/nothing]", 1))
    text = frame(Snapshot(1.0, LOAD, (kv,), (activity("[red]w"),)))
    assert "[bold]evil[/nothing]" in text
    assert "[red]w" in text


def test_a_worker_says_when_its_memory_is_short():
    short = activity("w1", memory_level=common_pb2.MEMORY_LEVEL_CRITICAL)
    text = frame(Snapshot(1.0, LOAD, (), (activity("w0"), short)))
    assert "w1 memory critical" in text
    assert "w0 memory" not in text


async def test_q_ends_it_and_restores_the_terminal(served):
    controller, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", "top", "--target", served.target),
        *("--interval-s", "0.05"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(terminal)
    shown = b""
    while b"q quits" not in shown:
        shown += await asyncio.to_thread(os.read, controller, 65536)
    os.write(controller, b"xq")
    while True:
        try:
            piece = await asyncio.to_thread(os.read, controller, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    assert await process.wait() == 0
    assert b"\x1b[?1049l" in shown  # back from the alternate screen
    os.close(controller)


async def test_without_a_terminal_there_is_nothing_to_watch(served, capsys):
    assert await run("top", "--target", served.target) == 1
    assert "--once prints one frame" in capsys.readouterr().err


def test_a_service_that_goes_leaves_the_last_frame_and_says_why(monkeypatch):
    screen = io.StringIO()
    console = Console(width=150, height=40, file=screen, force_terminal=True, color_system=None)
    presses = iter([False, True])
    monkeypatch.setattr(top, "_sleep", lambda _: next(presses))
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def fail() -> Snapshot:
        raise UnavailableError("went away")

    top._watch(console, "title", 0.01, Snapshot(1.0, LOAD), fail)
    last_frame = screen.getvalue().rpartition("went away")[2]
    assert "running 2 of 8" in last_frame

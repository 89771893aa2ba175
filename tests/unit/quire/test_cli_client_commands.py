"""`quire generate` and `quire chat` against a fake of the service."""

import asyncio
import io
import sys

import pytest

from quire.cli.__main__ import main
from quire.cli.commands.observe.status import describe_load
from quire.client.types import Load
from quire.v1 import common_pb2


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


async def test_generate_streams_the_text(served, capsys):
    assert await run("generate", "hello", "--target", served.target, "--max-tokens", "7") == 0
    assert capsys.readouterr().out == "one two\n"
    (request,) = served.fake.requests
    assert (request.text, request.sampling.max_tokens) == ("hello", 7)


async def test_a_prompt_is_pinned_if_it_is_said(served):
    await run("generate", "a", "--target", served.target)
    await run("generate", "a", "--target", served.target, "--cache-pin-s", "30")
    first, second = served.fake.requests
    assert not first.HasField("cache_pin_s")
    assert second.cache_pin_s == 30.0


async def test_generate_searches(served):
    flags = ["--beam-width=3", "--length-penalty=0.5", "--early-stopping=never", "-n=1"]
    assert await run("generate", "hello", "--target", served.target, *flags) == 0
    (request,) = served.fake.requests
    assert (request.beam.width, request.beam.length_penalty) == (3, 0.5)
    assert request.beam.early_stopping == common_pb2.EARLY_STOPPING_NEVER


async def test_generate_refuses_search_flags_without_a_beam_width(served, capsys):
    with pytest.raises(SystemExit):
        await run("generate", "hello", "--target", served.target, "--early-stopping=true")
    assert "--early-stopping needs --beam-width" in capsys.readouterr().err
    assert not served.fake.requests


async def test_generate_reads_standard_input(served, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert await run("generate", "-", "--target", served.target) == 0
    assert served.fake.requests[0].text == "from a pipe"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("bad", "sampling.top_p is 2; it must be in (0, 1]"),
        ("busy", "the queue is full"),
        ("fails", "the output ended early: lost (a retry may help)"),
    ],
)
async def test_failure_is_one_line_and_exit_code_1(served, capsys, prompt, message):
    served.fake.retry_after_s = 0.01  # it retries as often as allowed
    assert await run("generate", prompt, "--target", served.target) == 1
    assert capsys.readouterr().err == f"quire: {message}\n"


async def test_chat_sends_the_whole_conversation_each_time(served, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n/new\nthird\n"))
    assert await run("chat", "--target", served.target, "--system", "be brief") == 0
    assert capsys.readouterr().out == "one two\n" * 3
    chats = [
        [(m.role, m.content) for m in request.chat.messages]
        for request in served.fake.requests
        if request.DESCRIPTOR.name == "TokenizeRequest"
    ]
    system = ("system", "be brief")
    assert chats == [
        [system, ("user", "first")],
        [system, ("user", "first"), ("assistant", "one two"), ("user", "second")],
        [system, ("user", "third")],
    ]


async def test_status_of_a_router_elsewhere_is_its_load(served, capsys):
    assert await run("status", "--target", served.target) == 0
    output = capsys.readouterr().out
    assert "2 of 0 sequences running" in output
    assert "10 used" in output
    assert "75% of their token slots filled; 3 pinned; 25% fragmented" in output
    assert "host blocks: 50% used, 2 cached" in output
    assert "prefix cache: 25% of 8 tokens found" in output
    assert "disk blocks" not in output, "there is no such tier"


def test_status_shows_disk_blocks():
    load = Load(
        num_requests_running=1,
        num_requests_waiting=2,
        max_num_seqs=8,
        num_blocks=10,
        num_free_blocks=3,
        num_cached_blocks=4,
        block_size=16,
        num_workers=1,
        num_disk_blocks=40,
        num_free_disk_blocks=15,
        num_cached_disk_blocks=20,
    )
    assert "disk blocks: 12% used, 20 cached, 15 free" in describe_load(load)

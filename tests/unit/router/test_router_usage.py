"""Usage: thinking is counted by its markers, and a resumed stream only once."""

import asyncio
import contextlib
import hashlib
import json
from dataclasses import replace

import aiohttp
import pytest
from keyed_router import ALICE, bearer, keyed_settings, read_all, running
from router_fake_scheduler import LENGTH

from contract.codec.packing import pack_int32, pack_uint64
from contract.request import GenerateRequest, OutputReceived, ResumeRequest, ThinkingMarkers
from quire.v1 import inference_pb2, scheduler_pb2
from router.live.thinking_counter import ThinkingCounter
from router.live.usage import UsageCounts, UsageKey, Used
from router.parsers.harmony import THOUGHT_MESSAGES
from router.stored_turns.database import open_database
from router.stored_turns.usage import read_usage

PLAIN = ThinkingMarkers("<think>", ("</think>", "<call>"))
BEGUN = replace(PLAIN, has_begun=True)


def num_thinking(markers, texts):
    counter = ThinkingCounter(markers)
    for text in texts:
        if not counter.push(text):
            break
    return counter.num_tokens


@pytest.mark.parametrize(
    ("markers", "texts", "expected"),
    [
        (PLAIN, ["<think>", "\n", "Hm", ".", "</think>", "Yes", "<think>", "x"], 4),
        (PLAIN, [" ", "<th", "ink>", "Hm", "</", "think>", "Yes"], 3),
        (PLAIN, ["Yes", "<think>", "Hm", "</think>"], 0),
        (PLAIN, ["<think>", "Hm", "<call>", "x"], 2),
        (PLAIN, ["<think>Hm</think>Yes", "x"], 0),
        (PLAIN, ["<think>", "never", "", "ends"], 3),
        (BEGUN, ["Hm", ".", "</think>", "Yes"], 3),
        (
            THOUGHT_MESSAGES,
            [
                *("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>"),
                *("assistant", "<|channel|>", "analysis", "<|message|>", "So", "<|end|>"),
                *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes"),
            ],
            5,
        ),
    ],
)
def test_tokens_count_as_thinking_while_it_is_open(markers, texts, expected):
    assert num_thinking(markers, texts) == expected


def test_sums_keep_their_number_until_they_are_kept():
    counts, key = UsageCounts(), UsageKey("t", "k", "m")
    counts.add(key, Used(1, 2, 3, 4, 5))
    first, rows = counts.take()
    assert list(rows.values()) == [Used(1, 2, 3, 4, 5)]
    counts.add(key, Used(1))
    counts.add(key, Used())
    assert counts.take() == (first, rows)
    counts.kept()
    second, rows = counts.take()
    assert second > first
    assert list(rows.values()) == [Used(1)]
    counts.kept()
    assert not counts.take()[1]


async def test_a_stream_that_is_resumed_is_one_request(router):
    request = GenerateRequest(
        prompt=(5, 6, 7), request_id="r", resumable=True, tenant="t", thinking=BEGUN
    )
    live = await router.inference.generate(request)
    submit = await router.scheduler.submits.get()
    tokens = router.tokens("one two three four")
    key = submit.first_seq_key
    await router.scheduler.step({key: tokens[:2]}, admitted={key: 2})
    await anext(live)
    await live.aclose()
    ((_, used),) = router.usage.take()[1].items()
    assert used == Used(1, 3, 2, 2, 2)
    router.usage.kept()
    received = {0: OutputReceived(1, len(b"one"))}
    resuming = asyncio.create_task(
        router.inference.resume(
            ResumeRequest("r", "t", received, has_prompt_scores=False, deadline=None)
        )
    )
    key = (await router.scheduler.resumes.get()).first_seq_key
    so_far = scheduler_pb2.StepOutput(
        seq_keys=pack_uint64([key] * 3), token_ids=pack_int32(tokens[:3])
    )
    await router.scheduler.resumed(submit, key, so_far)
    async with await resuming as live:
        await router.scheduler.step({key: tokens[3:]}, finished={key: LENGTH})
        async for _ in live:
            pass
    ((_, used),) = router.usage.take()[1].items()
    num_rest = len(tokens) - 1  # the client had one token
    assert used == Used(generated_tokens=num_rest, reasoning_tokens=num_rest)


async def test_a_resumable_request_counts_though_its_reader_leaves_while_it_waits(router):
    request = GenerateRequest(prompt=(5, 6, 7), resumable=True, tenant="t")
    live = await router.inference.generate(request)
    await router.scheduler.submits.get()
    await live.aclose()
    assert list(router.usage.take()[1].values()) == [Used(1, 3)]


@contextlib.asynccontextmanager
async def used_by_alice(model_dir, tmp_path):
    """Run a router with API keys; check at the end that only Alice's key has usage."""
    place = str(tmp_path / "turns.sqlite")
    settings = keyed_settings(model_dir, tmp_path).model_copy(update={"turn_store": place})
    async with running(settings, tmp_path) as router:
        yield router
    database = open_database(place)
    rows = await read_usage(database, 0.0, None, ("key",))
    await database.close()
    assert [row.group["key"] for row in rows] == [hashlib.sha256(ALICE.encode()).hexdigest()[:8]]


async def test_what_is_resumed_is_used_by_the_key_that_resumes_it(model_dir, tmp_path):
    async with used_by_alice(model_dir, tmp_path) as router:
        call, submit = await router.submitted(ALICE, request_id="r", resumable=True)
        key = submit.first_seq_key
        await router.scheduler.step({key: [70]}, admitted={key: 0})
        await call.read()
        resume = inference_pb2.ResumeRequest(request_id="r")
        resumed = router.stub.Resume(resume, metadata=bearer(ALICE))
        key = (await router.scheduler.resumes.get()).first_seq_key
        await router.scheduler.resumed(submit, key)
        await router.scheduler.step({key: [70, 71]}, finished={key: LENGTH}, admitted={key: 0})
        await read_all(resumed)


async def test_lines_of_a_batch_are_used_by_the_key_that_made_it(model_dir, tmp_path):
    async with used_by_alice(model_dir, tmp_path) as router:
        url, headers = "/v1/completions", {"Authorization": f"Bearer {ALICE}"}
        body = {"prompt": "x", "max_tokens": 1}
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", json.dumps(line), filename="in.jsonl")
        async with router.http.post("/v1/files", data=form, headers=headers) as response:
            file_id = (await response.json())["id"]
        ask = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
        async with router.http.post("/v1/batches", json=ask, headers=headers) as response:
            batch = await response.json()
        await router.finish(await router.scheduler.submits.get())
        while batch["status"] != "completed":
            async with router.http.get(f"/v1/batches/{batch['id']}", headers=headers) as response:
                batch = await response.json()

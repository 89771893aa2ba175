"""The audit log: one line for each request, in private files that rotate."""

import asyncio
import json
import stat
from types import SimpleNamespace

import pytest
from router_fake_scheduler import LENGTH

from contract.outputs import Usage
from contract.request import GenerateRequest
from contract.sampling import SamplingParams
from router import metrics
from router.live.usage import UsageKey
from router.request.audit import AuditLog, AuditLogError


async def answer(router, prompt, text):
    request = GenerateRequest(prompt=prompt, tenant="t", sampling=SamplingParams(max_tokens=9))
    asking = asyncio.create_task(router.inference.generate(request))
    submit = await router.scheduler.submits.get()
    async with await asking as live:
        key = submit.first_seq_key
        await router.scheduler.step({key: router.tokens(text)}, finished={key: LENGTH})
        async for _ in live:
            pass


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_request_s_prompt_and_outputs_are_one_line(router, tmp_path):
    path = tmp_path / "logs" / "audit.jsonl"
    router.cells.shared.audit = AuditLog(path, 2**20, 2)
    await answer(router, "wörld\n", "one two")
    await asyncio.to_thread(router.cells.shared.audit.close)
    (line,) = lines(path)
    assert line["prompt"].endswith("wörld\n")
    assert line["outputs"] == [{"text": "one two", "finish_reason": "length"}]
    assert (line["tenant"], line["model"], line["adapter"]) == ("t", "tiny", "")
    assert line["generated_tokens"] == len(router.tokens("one two"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_text_is_made_once(tmp_path):
    made = []
    output = SimpleNamespace(token_ids=(7,), finished=None)
    live = SimpleNamespace(
        request_id="r",
        prompt_token_ids=(5,),
        outputs=[output],
        usage=Usage(1, 1, 0),
        usage_key=UsageKey("t", "k", "m"),
        goes_on=False,
    )
    audit = AuditLog(tmp_path / "audit.jsonl", 2**20, 2)
    audit.add(live, lambda token_ids: made.append(token_ids) or "text")
    await asyncio.to_thread(audit.close)
    (line,) = lines(tmp_path / "audit.jsonl")
    assert (line["prompt"], line["outputs"][0]["text"]) == ("text", "text")
    assert made == [(5,), (7,)]


async def test_a_full_file_is_kept_under_another_name_and_the_oldest_deleted(router, tmp_path):
    path = tmp_path / "audit.jsonl"
    audit = router.cells.shared.audit = AuditLog(path, 100, 3)  # each line is longer
    for text in ("one", "two", "three", "four"):
        await answer(router, "Say", text)
    await asyncio.to_thread(audit.close)
    files = [path, tmp_path / "audit.jsonl.1", tmp_path / "audit.jsonl.2"]
    assert [lines(file)[0]["outputs"][0]["text"] for file in files] == ["four", "three", "two"]
    assert sorted(tmp_path.glob("audit*")) == files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


async def test_what_cannot_be_written_is_counted_and_harms_no_request(router, tmp_path):
    audit = router.cells.shared.audit = AuditLog(tmp_path / "audit.jsonl", 2**20, 2)
    before = metrics.AUDIT_LINES_LOST._value.get()
    audit._handler.stream.close()  # like a lost disk
    await answer(router, "Say", "one")
    await asyncio.to_thread(audit._listener.stop)
    assert metrics.AUDIT_LINES_LOST._value.get() == before + 1


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(AuditLogError, match=f"--audit-log {tmp_path}: Is a directory"):
        AuditLog(tmp_path, 2**20, 2)

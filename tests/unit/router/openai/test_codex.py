"""Codex, unmodified, does a task with a scripted model over /v1/responses."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from openai_fakes import spell

CODEX = os.environ.get("CODEX") or shutil.which("codex")  # see the Makefile


@pytest.mark.public_clients
@pytest.mark.skipif(CODEX is None, reason="needs @openai/codex, from npm")
async def test_it_calls_a_tool_and_reads_its_result(server, inference, tmp_path: Path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    call = {"name": "exec_command", "arguments": {"cmd": "printf 42 > answer.txt"}}
    turns = [f"I write it.\n<tool_call>{json.dumps(call)}</tool_call>", "It is written."]

    def script(request):
        return spell(turns[len(inference.requests) - 1])(request)

    inference.script = script
    host, port = server
    settings = {
        "model": '"org/tiny"',
        "model_provider": '"quire"',
        "model_providers.quire": f'{{name="quire", base_url="http://{host}:{port}/v1"}}',
    }
    process = await asyncio.create_subprocess_exec(
        *(str(CODEX), "exec", "--skip-git-repo-check", "--json", "-s", "danger-full-access"),
        *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
        "Write the answer.",
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    shown, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors.decode() + shown.decode()
    items = [json.loads(line).get("item", {}) for line in shown.decode().splitlines()]
    said = [item["text"] for item in items if item.get("type") == "agent_message"]
    assert said == ["I write it.", "It is written."]
    assert (work / "answer.txt").read_text() == "42"
    *_, called, result = inference.text.chats[-1][0]
    assert called["tool_calls"][0]["function"] == call
    assert (result["role"], result["tool_call_id"]) == ("tool", called["tool_calls"][0]["id"])

"""Claude Code, unmodified, does a task with a scripted model: it calls a tool, and ends."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from openai_fakes import spell

CLAUDE = os.environ.get("CLAUDE_CODE") or shutil.which("claude")  # see the Makefile


@pytest.mark.public_clients
@pytest.mark.skipif(CLAUDE is None, reason="needs @anthropic-ai/claude-code, from npm")
async def test_it_calls_a_tool_and_reads_its_result(url, inference, tmp_path: Path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    wanted = work / "answer.txt"
    call = {"name": "Write", "arguments": {"file_path": str(wanted), "content": "42"}}
    turns = [f"I write it.\n<tool_call>{json.dumps(call)}</tool_call>", "It is written."]

    def script(request):
        return spell(turns[len(inference.requests) - 1])(request)

    inference.script = script
    process = await asyncio.create_subprocess_exec(
        *(str(CLAUDE), "-p", "Write the answer.", "--allowedTools", "Write"),
        *("--output-format", "json"),
        cwd=work,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "org/tiny",
            "ANTHROPIC_SMALL_FAST_MODEL": "org/tiny",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    shown, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors.decode() + shown.decode()
    told = json.loads(shown)
    assert (told["result"], told["is_error"], told["num_turns"]) == ("It is written.", False, 2)
    assert wanted.read_text() == "42"
    messages, variables = inference.text.chats[-1]
    assert "Write" in [tool["function"]["name"] for tool in variables["tools"]]
    called, result = next(
        (message, messages[i + 1]) for i, message in enumerate(messages) if "tool_calls" in message
    )
    assert called["content"] == "I write it."
    assert called["tool_calls"][0]["function"] == call
    assert result["role"] == "tool"
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]
    assert "created successfully" in result["content"]

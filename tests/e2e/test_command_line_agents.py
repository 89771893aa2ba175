"""Codex and Claude Code, unmodified, work through several calls against a live, scripted service.

`make agents-test` installs both from npm.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.service import Service

pytestmark = pytest.mark.public_clients

SHIPPED_MODEL = Path(__file__).parents[2] / "models" / "quire-tiny-python"
CODEX, CLAUDE = shutil.which("codex"), shutil.which("claude")
NUM_CALLS = 5
MODEL_LEN = 2**18
DONE = "It is written."
TIMEOUT_S = 240
# The script's output N follows N end tokens: one ends each result of a tool.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}\n"
    "{% if m.role == 'tool' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def serve(tmp_path: Path, run_dir: Callable[[], Path]) -> Iterator[Callable[..., str]]:
    """Starts a service with a store, whose model calls a tool several times; returns its URL."""
    stack = ExitStack()

    def start(tool: str, argument: str) -> str:
        model = tmp_path / "tiny"
        model.mkdir()
        shutil.copy(SHIPPED_MODEL / "tokenizer.json", model)
        for name, changes in (
            ("config.json", {"max_position_embeddings": MODEL_LEN}),
            ("tokenizer_config.json", {"chat_template": TEMPLATE, "model_max_length": MODEL_LEN}),
        ):
            fields = json.loads((SHIPPED_MODEL / name).read_text())
            (model / name).write_text(json.dumps(fields | changes))
        calls = [
            {"name": tool, "arguments": {argument: f"printf {i} >> answer.txt"}}
            for i in range(NUM_CALLS)
        ]
        said = [
            f"I write {i}.\n<tool_call>{json.dumps(call)}</tool_call>"
            for i, call in enumerate(calls)
        ]
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        script = tmp_path / "script.json"
        script.write_text(
            json.dumps(
                [tokenizer.encode(text, add_special_tokens=False).ids for text in (*said, DONE)]
            )
        )
        directory = run_dir()
        service = Service(
            directory,
            model,
            worker=["--num-blocks=20000", "--speedup=100"],
            router=["--tool-parser=hermes", f"--turn-store={directory}/turns.sqlite"],
            script=script,
        )
        return str(stack.enter_context(service).url)

    with stack:
        yield start


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def run(work: Path, *command: str, **env: str) -> str:
    """Runs a command to its end in a home of its own; returns what it has printed."""
    done = subprocess.run(
        command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(work.parent / "home"), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.skipif(CODEX is None, reason="needs @openai/codex, from npm")
def test_codex(serve: Callable[..., str], work: Path):
    url = serve("exec_command", "cmd")
    settings = {
        "model": '"tiny"',
        "model_provider": '"quire"',
        "model_providers.quire": f'{{name="quire", base_url="{url}/v1"}}',
        "web_search": '"disabled"',
        "features.multi_agent": "false",
    }
    shown = run(
        work,
        *(str(CODEX), "exec", "--skip-git-repo-check", "--json", "-s", "danger-full-access"),
        *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
        "Write the answer.",
    )
    items = [json.loads(line).get("item", {}) for line in shown.splitlines()]
    said = [item["text"] for item in items if item.get("type") == "agent_message"]
    assert said == [*(f"I write {i}." for i in range(NUM_CALLS)), DONE]
    assert (work / "answer.txt").read_text() == "01234"


@pytest.mark.skipif(CLAUDE is None, reason="needs @anthropic-ai/claude-code, from npm")
def test_claude_code(serve: Callable[..., str], work: Path):
    url = serve("Bash", "command")
    shown = run(
        work,
        *(str(CLAUDE), "-p", "Write the answer.", "--allowedTools", "Bash"),
        *("--output-format", "json"),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="tiny",
        ANTHROPIC_SMALL_FAST_MODEL="tiny",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    told = json.loads(shown)
    assert (told["result"], told["is_error"]) == (DONE, False)
    assert told["num_turns"] == NUM_CALLS + 1
    assert (work / "answer.txt").read_text() == "01234"

"""The commands in docs/features.md work: their files, subcommands, flags and targets exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate.flags import PROCESSES, commands

ROOT = Path(__file__).parents[2]
ROWS = [
    line.rsplit("|", 2)[1]
    for line in (ROOT / "docs" / "features.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| feature")
]
COMMANDS = sorted({command for row in ROWS for command in re.findall(r"`([^`]+)`", row)})
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
SETTINGS = PROCESSES | commands()
FLAGS = {f"--{name.replace('_', '-')}" for cls in SETTINGS.values() for name in cls.model_fields}


def words_of(command: str) -> list[str]:
    """The words of a command, without a `python` before them."""
    return command.removeprefix(".venv/bin/python ").removeprefix("python ").split()


def test_every_feature_has_a_command_or_a_page():
    assert len(ROWS) >= 60
    assert not [row for row in ROWS if not re.search(r"`[^`]+`|\]\(", row)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_typed(command):
    first, *rest = words_of(command)
    if first == "pytest":
        assert rest
        assert all((ROOT / path).exists() for path in rest)
    elif first == "make":
        assert rest[0] in TARGETS
    elif first == "-m":
        assert (ROOT / rest[0].replace(".", "/") / "__main__.py").is_file()
    elif first == "quire" or first.startswith("quire-"):
        name = " ".join([first, rest[0]]) if first == "quire" else first
        known = {f"--{field.replace('_', '-')}" for field in SETTINGS[name].model_fields}
        assert {word for word in rest if word.startswith("--")} <= known
    elif first.startswith("--"):
        assert first in FLAGS
    elif first.startswith("bench/") and first.endswith(".py"):
        source = (ROOT / first).read_text()
        assert all(f'"{word}"' in source for word in rest if word.startswith("--"))
    else:
        assert (ROOT / first).exists(), f"no rule for {command!r}"


@pytest.mark.parametrize(
    "program",
    sorted({w for c in COMMANDS for w in words_of(c) if re.fullmatch(r"bench/\w+\.py", w)}),
)
def test_a_benchmark_says_how_it_is_used(program):
    run = [sys.executable, str(ROOT / program), "--help"]
    assert subprocess.run(run, capture_output=True, timeout=120, check=False).returncode == 0

"""The clients of `clients/`, built from the protos alone, all do the same: what ours does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.client import Client, SamplingParams
from tests.e2e.child import eventually

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "clients"

LANGUAGES = {
    "python": ((), [sys.executable, OUT / "python" / "client.py"]),
    "python-aio": ((), [sys.executable, OUT / "python" / "client_aio.py"]),
    "node": (("node", "npm"), ["node", OUT / "node" / "client.js"]),
    "go": (
        ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        [OUT / "go" / "client"],
    ),
    "cpp": (("c++", "protoc", "grpc_cpp_plugin", "pkg-config"), [OUT / "cpp" / "client"]),
}
"""What each is built with, and how it is run."""


def build(language):
    """Build a client; skip if that needs what this machine lacks."""
    tools, command = LANGUAGES[language]
    if missing := [tool for tool in ("make", *tools) if shutil.which(tool) is None]:
        pytest.skip(f"THE CLIENT IN {language.upper()} IS NOT TESTED: no {', '.join(missing)} here")
    if language == "node" and not is_installed():
        pytest.skip("THE CLIENT IN NODE IS NOT TESTED: npm cannot install what it needs here")
    if language == "go" and not Path("/usr/share/gocode/src/google.golang.org/grpc").is_dir():
        pytest.skip("THE CLIENT IN GO IS NOT TESTED: no golang-google-grpc-dev here")
    if language == "cpp" and subprocess.run(["pkg-config", "--exists", "grpc++"]).returncode:
        pytest.skip("THE CLIENT IN CPP IS NOT TESTED: no libgrpc++-dev here")
    make(language.removesuffix("-aio"), check=True)
    return list(map(str, command))


def make(goal, *, check):
    argv = ["make", "-s", "-C", str(ROOT / "clients"), goal, f"PYTHON={sys.executable}"]
    return subprocess.run([*argv, f"OUT={OUT}"], check=check)


def is_installed():
    """Whether npm can get the packages, from wherever it is told to."""
    return make("node", check=False).returncode == 0


@pytest.fixture(scope="module")
def expected(target):
    """What every client must print."""
    with Client(target) as client:
        completion = client.generate_once(
            "def add(a, b):\n    return", SamplingParams(temperature=0, max_tokens=16), stop=("\n",)
        )
    (output,) = completion.outputs
    assert output.text.strip(), "the model says nothing: the test would see nothing"
    return {
        f"stream.finish_reason FINISH_REASON_{output.finished.finish_reason.name}",
        f"stream.usage {completion.usage.prompt_tokens} {completion.usage.completion_tokens}",
        f"stream.text {output.text}",
        f"stream.token_ids {' '.join(map(str, output.token_ids))}",
        "cancel.code 1",
        "deadline.code 4",
        "error.code 3",
        "error.violation sampling.temperature is -1.0; it must be in [0, 100]",
    }


@pytest.mark.parametrize("language", LANGUAGES)
def test_it_streams_cancels_sets_a_deadline_and_reads_an_error(language, target, expected):
    command = build(language)
    environment = {
        **os.environ,
        "PYTHONPATH": str(OUT / "python"),  # the stubs just made, rather than ours
        "PROTOS": str(OUT / "protos"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    ran = subprocess.run(
        [*command, target], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.splitlines()) == expected
    with Client(target) as client:  # what was cancelled, or ran out of time, holds nothing

        def idle():
            load = client.load()
            return load.num_requests_running + load.num_requests_waiting == 0 or None

        eventually(idle, "the service is idle")

"""The clients in `clients/`, built from the protos alone, do the same as Quire's Python client."""

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
"""By language: the needed tools, and the command of the client."""


LIBRARIES = {
    "node": ["make", "-s", "-C", ROOT / "clients", "node"],  # npm may be able to install them
    "go": ["test", "-d", "/usr/share/gocode/src/google.golang.org/grpc"],
    "cpp": ["pkg-config", "--exists", "grpc++", "protobuf"],
}
"""By language: a command that succeeds if its libraries are installed."""


def build(language):
    """Build a client, and return its command; skip if the machine lacks a tool."""
    tools, command = LANGUAGES[language]
    missing = [tool for tool in ("make", *tools) if shutil.which(tool) is None]
    if not missing and language in LIBRARIES and run(LIBRARIES[language]).returncode:
        missing = ["gRPC for it"]
    if missing:
        pytest.skip(f"THE CLIENT IN {language.upper()} IS NOT TESTED: no {', '.join(missing)} here")
    made = run(["make", "-s", "-C", ROOT / "clients", language.removesuffix("-aio")])
    assert made.returncode == 0, made.stderr
    return command


def run(command):
    environment = {
        **os.environ,
        "OUT": str(OUT),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(OUT / "python"),  # prefer the stubs just made to Quire's
        "PROTOS": str(OUT / "protos"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def expected(target):
    """The expected output of every client."""
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
    ran = run([*build(language), target])
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.splitlines()) == expected
    with Client(target) as client:  # cancelled and timed-out requests hold no blocks

        def idle():
            load = client.load()
            return load.num_requests_running + load.num_requests_waiting == 0 or None

        eventually(idle, "the service is idle")

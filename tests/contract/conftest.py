"""Fixtures of the contract tests: compiled protos, and running workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from both_workers import real_steps, served_steps, simulated_steps
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"


def compile_protos(*options):
    """Run `protoc` on every proto, as `make protos` does."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    assert files
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTOS), *options, *files],
        check=True,
        cwd=ROOT,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )


@pytest.fixture(scope="session")
def generated(tmp_path_factory):
    """A folder of freshly generated stubs."""
    folder = tmp_path_factory.mktemp("stubs")
    out = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    compile_protos(*out)
    return folder


@pytest.fixture(scope="session")
def descriptors(tmp_path_factory):
    """A FileDescriptorSet of every proto, with source info."""
    path = tmp_path_factory.mktemp("descriptors") / "set.bin"
    compile_protos("--include_source_info", f"--descriptor_set_out={path}")
    return descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())


@pytest.fixture(params=[real_steps, simulated_steps], ids=["real", "simulated"])
async def worker(request, tmp_path):
    async with served_steps(request.param, tmp_path) as stub:
        yield stub

"""The log line about the kernels in C when a worker starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.loading import device
from kernels.cpu.build import Build
from kernels.cpu.targets import SHIPPED_TARGETS, THIS_CPU

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PATH = Path("/somewhere/library.so")


def logged(monkeypatch, build, on=CPU):
    library = None if build is None else SimpleNamespace(build=build)
    monkeypatch.setattr(device, "native", lambda: library)
    with capture_logs() as logs:
        device.log_kernels(on)
    return logs


def test_it_names_the_library_that_runs(monkeypatch):
    (line,) = logged(monkeypatch, Build(PATH, THIS_CPU))
    assert line["event"] == "kernels in C, compiled for this CPU"
    assert line["library"] == str(PATH)


@pytest.mark.parametrize("target", SHIPPED_TARGETS)
def test_a_shipped_library_is_named_and_why_none_was_compiled(monkeypatch, target):
    (line,) = logged(monkeypatch, Build(PATH, target, "no C compiler; looked for gcc, cc"))
    assert line["event"] == f"kernels in C, shipped for {target.name}"
    assert line["not_compiled"] == "no C compiler; looked for gcc, cc"


def test_without_kernels_in_c_a_warning_has_said_so(monkeypatch):
    assert logged(monkeypatch, None) == []


def test_a_worker_on_a_gpu_compiles_nothing(monkeypatch):
    def compiles():
        raise AssertionError("the C kernels are compiled")

    monkeypatch.setattr(device, "native", compiles)
    device.log_kernels(GPU)

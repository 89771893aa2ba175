"""The log lines about Intel's AMX when a worker starts."""

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.loading import device
from kernels.cpu.amx_choice import AmxChoice, AmxFindings, Times

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TIMES = {"bfloat16": Times(30.0, 5.0, 0.3, 0.2), "int4": Times(30.0, 5.0, 0.1, 0.2)}
MEASURED = AmxFindings({}, "2026-11-23", 1, None, TIMES)
WRONG = AmxFindings({}, "2026-11-23", 1, "a map: a result is wrong by 1")


def set_amx(monkeypatch, choice, wanted="auto", on=CPU):
    """The result of `set_amx`, and its log lines, for a choice."""
    monkeypatch.setattr(device, "choose_amx", lambda _: choice)
    with capture_logs() as logs:
        return device.set_amx(wanted, on), logs


def test_one_line_says_what_was_measured(monkeypatch):
    for chosen, words in (("bfloat16", "attention"), "used"), ((), "not used"):
        uses, (line,) = set_amx(monkeypatch, AmxChoice(chosen, MEASURED))
        assert uses == line["uses"] == chosen
        assert line["log_level"] == "info"
        assert line["event"] == f"AMX is {words}"
        assert line["milliseconds"]["bfloat16"]["amx_prompt_ms"] == 5.0
        assert line["milliseconds"]["int4"]["avx512_row_ms"] == 0.1


@pytest.mark.parametrize("wanted", ["auto", "on"])
def test_a_check_that_failed_is_a_warning(monkeypatch, wanted):
    choice = AmxChoice((), WRONG)
    uses, (line,) = set_amx(monkeypatch, choice, wanted)
    assert not uses
    assert (line["log_level"], line["failure"]) == ("warning", WRONG.failure)


def test_a_cpu_without_it_is_a_warning_only_if_it_was_asked_for(monkeypatch):
    assert set_amx(monkeypatch, None) == ((), [])
    for on in CPU, GPU:
        uses, (line,) = set_amx(monkeypatch, None, "on", on)
        assert not uses
        assert line["log_level"] == "warning"


def test_a_worker_on_a_gpu_compiles_nothing(monkeypatch):
    def compiles(_):
        raise AssertionError("the C kernels are compiled")

    monkeypatch.setattr(device, "choose_amx", compiles)
    assert not device.set_amx("auto", GPU)


def test_off_is_said(monkeypatch):
    choice = AmxChoice((), findings=None)
    uses, (line,) = set_amx(monkeypatch, choice, "off")
    assert not uses
    assert line["event"] == "AMX is not used: the setting amx is off"

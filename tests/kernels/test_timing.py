"""A launch that cannot be captured is timed directly, and leaves torch as it was.

The fakes stand in for `torch.cuda`, and fail as CUDA does.
"""

from types import SimpleNamespace

import pytest
import torch

from kernels.tuning.timing import seconds_of
from tests.fake_captures import DEVICE, FakeCuda


class FakeEvent:
    def __init__(self, **_):
        pass

    def record(self):
        pass

    def elapsed_time(self, _):
        return 2.0


class TimedCuda(FakeCuda):
    """Also has events, and memory to flush the cache with."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        flush = SimpleNamespace(zero_=lambda: None)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: flush)

    @property
    def launched(self):
        return ["directly" if each == "directly" else "replay" for each in self.log]

    def launch(self):
        super().launch("directly")

    def launch_and_synchronize(self):
        self.launch()
        self.synchronize_a_stream()


def test_a_launch_is_replayed(monkeypatch):
    cuda = TimedCuda(monkeypatch)
    assert seconds_of(cuda.launch, DEVICE, 2) == pytest.approx(2e-3)
    assert cuda.launched == ["directly"] * 3 + ["replay"] * 3
    assert cuda.current is cuda.default


def test_after_a_launch_that_cannot_be_captured_the_next_one_is_timed_as_ever(monkeypatch):
    cuda = TimedCuda(monkeypatch)
    assert seconds_of(cuda.launch_and_synchronize, DEVICE, 2) == pytest.approx(2e-3)
    assert cuda.launched == ["directly"] * 5
    assert cuda.current is cuda.default
    assert cuda.allocates_to == []
    cuda.log.clear()
    seconds_of(cuda.launch, DEVICE, 1)
    assert cuda.launched == ["directly"] * 3 + ["replay"] * 2


def test_other_errors_pass_through_and_end_the_capture(monkeypatch):
    cuda = TimedCuda(monkeypatch)

    def launch():
        if cuda.allocates_to:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seconds_of(launch, DEVICE, 1)
    assert cuda.allocates_to == []
    assert cuda.current is cuda.default

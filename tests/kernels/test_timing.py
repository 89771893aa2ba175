"""A launch that cannot be captured is timed directly, and leaves torch as it was.

The fakes stand in for `torch.cuda`, and fail as CUDA does.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kernels.tuning.timing import seconds_of

DEVICE = torch.device("cuda:0")
POOL = (0, 7)


class FakeEvent:
    def __init__(self, **_):
        pass

    def record(self):
        pass

    def elapsed_time(self, _):
        return 2.0


class FakeCuda:
    """Ends a failed capture as torch does: it raises before it restores anything."""

    def __init__(self, monkeypatch):
        self.default = SimpleNamespace(device_index=0)
        self.current = self.default
        self.allocates_to = []
        self.has_failed = False
        self.launched = []
        for name, value in {
            "Stream": lambda device: SimpleNamespace(
                device_index=device.index, wait_stream=lambda _: None
            ),
            "stream": self.stream,
            "current_stream": lambda: self.current,
            "graph_pool_handle": lambda: POOL,
            "synchronize": lambda *_: None,
            "Event": FakeEvent,
            "CUDAGraph": lambda: FakeGraph(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        flush = SimpleNamespace(zero_=lambda: None)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: flush)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def end(self, device_index, pool):
        assert device_index == 0
        if pool not in self.allocates_to:
            raise RuntimeError("the allocator does not allocate to this pool")
        self.allocates_to.remove(pool)

    def launch(self):
        if not self.allocates_to:
            self.launched.append("directly")

    def launch_and_synchronize(self):
        self.launch()
        if self.allocates_to:
            self.has_failed = True
            raise RuntimeError("operation not permitted when stream is capturing")


class FakeGraph:
    def __init__(self, cuda):
        self.cuda = cuda

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert self.cuda.current is not self.cuda.default
        assert not self.cuda.allocates_to, "one capture at a time"
        self.cuda.allocates_to.append(pool)

    def capture_end(self):
        if self.cuda.has_failed or not self.cuda.allocates_to:
            self.cuda.has_failed = False
            raise RuntimeError("capture_end: operation failed due to a previous error")
        self.cuda.allocates_to.remove(POOL)

    def replay(self):
        self.cuda.launched.append("replay")


def test_a_launch_is_replayed(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    assert seconds_of(cuda.launch, DEVICE, 2) == pytest.approx(2e-3)
    assert cuda.launched == ["directly"] * 3 + ["replay"] * 3
    assert cuda.current is cuda.default


def test_after_a_launch_that_cannot_be_captured_the_next_one_is_timed_as_ever(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    assert seconds_of(cuda.launch_and_synchronize, DEVICE, 2) == pytest.approx(2e-3)
    assert cuda.launched == ["directly"] * 5
    assert cuda.current is cuda.default
    assert cuda.allocates_to == []
    cuda.launched.clear()
    seconds_of(cuda.launch, DEVICE, 1)
    assert cuda.launched == ["directly"] * 3 + ["replay"] * 2


def test_other_errors_pass_through_and_end_the_capture(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def launch():
        if cuda.allocates_to:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seconds_of(launch, DEVICE, 1)
    assert cuda.allocates_to == []
    assert cuda.current is cuda.default

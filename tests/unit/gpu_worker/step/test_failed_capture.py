"""A capture that fails as CUDA's do leaves torch as it was. The fakes stand in for `torch.cuda`."""

import contextlib

import pytest
import torch

from gpu_worker.step.cuda_graphs import CudaGraphs

DEVICE = torch.device("cuda:0")
POOL = (0, 7)


class FakeStream:
    def __init__(self, device):
        self.device_index = device.index

    def wait_stream(self, _):
        pass


class FakeCuda:
    """Ends a failed capture as torch does: it raises before it restores anything."""

    def __init__(self, monkeypatch):
        self.default = FakeStream(DEVICE)
        self.current = self.default
        self.allocates_to = []
        for name in ("Stream", "current_stream", "set_stream", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    Stream = FakeStream

    def replay(self):
        pass

    def current_stream(self):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, _, pool, stream, **__):
        before, self.current = self.current, stream
        self.allocates_to.append(pool)
        try:
            yield
        except RuntimeError:
            raise RuntimeError("capture_end: operation failed due to a previous error") from None
        self.allocates_to.remove(pool)
        self.current = before

    def end(self, device_index, pool):
        assert device_index == DEVICE.index
        self.allocates_to.remove(pool)


def test_a_failed_capture_leaves_stream_and_allocator_as_they_were(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    graphs = CudaGraphs(DEVICE)
    calls = []

    def waits_for_the_device():
        calls.append(cuda.current)
        if cuda.allocates_to:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capture_end"):
        graphs.capture(waits_for_the_device)
    assert len(calls) == 2
    assert cuda.current is cuda.default
    assert cuda.allocates_to == []
    graphs.capture(lambda: None)()
    assert cuda.current is cuda.default

"""Fakes of `torch.cuda` for captures of graphs, which fail as CUDA's do."""

import contextlib

import torch

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
        self.has_failed = False
        self.log = []
        """What the device computed, and replays by the number of their graph."""
        for name in ("Stream", "current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        self.num_graphs = 0
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    Stream = FakeStream

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def end(self, device_index, pool):
        assert device_index == DEVICE.index
        if pool not in self.allocates_to:
            raise RuntimeError("the allocator does not allocate to this pool")
        self.allocates_to.remove(pool)

    def launch(self, what):
        if not self.allocates_to:
            self.log.append(what)

    def synchronize_a_stream(self):
        if self.allocates_to:
            self.has_failed = True
            raise RuntimeError("operation not permitted when stream is capturing")


class FakeGraph:
    def __init__(self, cuda):
        self.cuda = cuda
        self.number = None

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
        self.number = self.cuda.num_graphs
        self.cuda.num_graphs += 1

    def replay(self):
        assert self.number is not None, "it was captured"
        self.cuda.log.append(self.number)

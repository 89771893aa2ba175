"""Backends without a GPU.

`FakeGraphs` captures a whole graph as the function that computes it. `FakePieces` records the
operations between the calls of attention, with their tensors. Like a graph, a replay computes them
again with the same tensors, and repeats nothing else that Python did during the capture.
"""

import contextlib

import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import ops
from kernels.cpu.linear import PackedLinear

_NOT_PERMITTED = "operation not permitted when stream is capturing"


class FakeGraphs:
    """`fails_at` is the number of the capture that fails, from 0; None: none fails."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, compute):
        if self.num_captures == self.fails_at:
            raise RuntimeError(_NOT_PERMITTED)
        self.num_captures += 1
        compute(lambda work: work())

        def replay():
            self.num_replays += 1
            compute(lambda work: work())

        return replay

    def alias(self, tensor):
        return tensor


class FakePieces(FakeGraphs):
    """Captures whole graphs, too. Fails, like a GPU, when the host reads a tensor's value."""

    def __init__(self, monkeypatch, fails_at=None):
        super().__init__(fails_at)
        self.num_parts = []
        """By capture: graphs, and works between them."""
        self._tape = None
        kernels = "add_rms_norm", "rms_norm", "rotary", "rotary_store_kv", "silu_mul", "store_kv"
        kernels += ("clamped_swiglu", "tanh_gelu_mul")
        kernels += "greedy", "grouped_linear", "grouped_quantized_linear", "paged_attention_decode"
        collectives = "all_reduce", "all_gather", "send", "recv"
        for where, name in [
            (PackedLinear, "__call__"),
            *((ops, name) for name in kernels),
            *((torch.distributed, name) for name in collectives),
        ]:
            monkeypatch.setattr(where, name, self._recorded(getattr(where, name)))

        for name in ("tolist", "item", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._refused(getattr(torch.Tensor, name)))

    def capture(self, compute):
        if self.num_captures == self.fails_at:
            raise RuntimeError(_NOT_PERMITTED)
        self.num_captures += 1
        compute(lambda work: work())
        tape = _Tape()

        def between(work):
            tape.parts += [work, []]

        self._tape = tape
        try:
            with tape:
                compute(between)
        finally:
            self._tape = None
        self.num_parts.append(len(tape.parts))

        def replay():
            self.num_replays += 1
            for part in tape.parts:
                if callable(part):
                    part()
                else:
                    for function, args, kwargs, results in part:
                        _copy(results, function(*args, **kwargs))

        return replay

    def _refused(self, read):
        def refused(*args):
            if self._tape is not None:
                raise RuntimeError(_NOT_PERMITTED)
            return read(*args)

        return refused

    def _recorded(self, op):
        """The op, recorded as one operation: native code, or a twin that reads values."""

        def recorded(*args, **kwargs):
            tape, self._tape = self._tape, None
            if tape is None:
                return op(*args, **kwargs)
            with tape.paused():
                results = op(*args, **kwargs)
            tape.parts[-1].append((op, args, kwargs, results))
            self._tape = tape
            return results

        return recorded


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.parts = [[]]
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self):
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        results = function(*args, **kwargs)
        if not self._is_paused:
            self.parts[-1].append((function, args, kwargs, results))
        return results


def _copy(old, new):
    for each, result in zip(tree_leaves(old), tree_leaves(new), strict=True):
        if isinstance(each, torch.Tensor) and each.data_ptr() != result.data_ptr():
            each.copy_(result)

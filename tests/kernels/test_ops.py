import inspect
import subprocess
import sys

import pytest
import torch

from kernels import ops, reference
from kernels.cpu import native_ops as native
from kernels.triton import ops as triton_ops
from tests.kernels.tensors import make_paged
from tests.kernels.tolerance import assert_close

NAMES = reference.__all__


class OnGpu:
    is_cpu = False
    is_cuda = True


def parameters(function):
    return [(p.name, p.annotation) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", NAMES)
def test_launcher_twin_and_op_have_one_signature(name):
    twin = getattr(reference, name)
    assert parameters(getattr(triton_ops, name)) == parameters(twin)
    assert parameters(getattr(native, name)) == parameters(twin)
    assert parameters(getattr(ops, name)) == parameters(twin)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_tensor_goes_to_the_launcher(name, monkeypatch):
    monkeypatch.setattr(triton_ops, name, lambda *args, **kwargs: ("launcher", args, kwargs))
    on_gpu = OnGpu()
    assert getattr(ops, name)(on_gpu, 2) == ("launcher", (on_gpu, 2), {})
    assert getattr(ops, name)(x=on_gpu) == ("launcher", (), {"x": on_gpu})
    assert getattr(ops, name).__wrapped__ is getattr(reference, name)


def test_an_op_on_cpu_tensors_is_the_native_one():
    gate_up = torch.randn(2, 6)
    assert torch.equal(ops.silu_mul(gate_up), native.silu_mul(gate_up))


def test_an_op_on_any_other_device_is_the_twin():
    assert ops.silu_mul(torch.randn(2, 6, device="meta")).is_meta


def test_a_cpu_worker_does_not_import_triton():
    program = "import sys, kernels.ops; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_decode_replays_from_a_cuda_graph_with_other_lengths():
    paged = make_paged([40, 600, 0], 2, 64, 16, torch.bfloat16, "cuda", max_blocks=40)
    query = torch.randn(3, 8, 64, device="cuda", dtype=torch.bfloat16)
    args = query, *paged.args, 0.125
    ops.paged_attention_decode(*args)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.paged_attention_decode(*args)
    paged.seq_lens.copy_(torch.tensor([640, 3, 17]))
    graph.replay()
    assert_close(out, reference.paged_attention_decode(*args))

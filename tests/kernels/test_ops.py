import inspect
import subprocess
import sys

import pytest
import torch

from kernels import ops, reference
from kernels.cpu import ops as in_c
from kernels.cpu.library import native
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
    assert parameters(ops.launcher(twin)) == parameters(twin)
    assert parameters(getattr(ops, name)) == parameters(twin)


@pytest.mark.parametrize("name", sorted(set(NAMES) & set(vars(in_c))))
def test_c_takes_the_library_and_what_the_twin_takes(name):
    assert parameters(getattr(in_c, name))[1:] == parameters(getattr(reference, name))


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_tensor_goes_to_the_launcher(name, monkeypatch):
    module = sys.modules[ops.launcher(getattr(reference, name)).__module__]
    monkeypatch.setattr(module, name, lambda *args, **kwargs: ("launcher", args, kwargs))
    on_gpu = OnGpu()
    assert getattr(ops, name)(on_gpu, 2) == ("launcher", (on_gpu, 2), {})
    assert getattr(ops, name)(x=on_gpu) == ("launcher", (), {"x": on_gpu})
    assert getattr(ops, name).__wrapped__ is getattr(reference, name)


@pytest.mark.skipif(native() is None, reason="needs native code")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_op_on_cpu_tensors_calls_c(dtype, monkeypatch):
    calls = []
    kernel = native().silu_mul
    monkeypatch.setattr(
        native(), "silu_mul", lambda *fields: calls.append(fields) or kernel(*fields)
    )
    ops.silu_mul(torch.randn(2, 6).to(dtype))
    assert len(calls) == 1


def test_an_op_on_cpu_tensors_of_a_dtype_that_c_does_not_know_is_the_twin():
    gate_up = torch.randn(2, 6).half()
    assert torch.equal(ops.silu_mul(gate_up), reference.silu_mul(gate_up))


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

"""A GPU worker compiles no C: it has no use for it, and perhaps no compiler.

The tensors are on a CUDA device and have no memory (torch's FakeTensorMode).
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_worker.models.llama.config import LlamaConfig
from gpu_worker.models.llama.decoder import build_llama
from gpu_worker.models.rope import RopeConfig
from gpu_worker.weights.gpu_linear import OneTileLinear
from gpu_worker.weights.linear import PlainLinear, make_linear
from gpu_worker.weights.quantized_linear import Quantization, can_multiply, quantize
from gpu_worker.weights.reader import Weights
from kernels import ops, reference
from kernels.cpu import library

DTYPE = torch.bfloat16
CONFIG = LlamaConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    max_model_len=64,
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    eos_token_ids=(),
    dtype="bfloat16",
    hidden_size=64,
    num_heads=4,
    intermediate_size=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    rotary_dim=16,
    has_fused_qkv=False,
    has_fused_gate_up=False,
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    attention_scale=0.25,
    windows=(None,) * 2,
    experts=None,
)


class CompiledError(AssertionError):
    pass


@pytest.fixture
def gpu(monkeypatch):
    def refuse(*_):
        raise CompiledError

    monkeypatch.setattr(library, "find_or_build", refuse)
    library.native.cache_clear()
    with FakeTensorMode():
        yield torch.device("cuda:0")
    library.native.cache_clear()


class EveryName:
    def __contains__(self, _):
        return True


@pytest.mark.usefixtures("gpu")
def test_a_map_on_a_cpu_is_compiled():
    with pytest.raises(CompiledError):
        make_linear(torch.zeros(64, 64, dtype=DTYPE), None)


def test_no_map_is_packed_for_a_cpu(gpu):
    weight = torch.zeros(64, 64, dtype=DTYPE, device=gpu)
    assert isinstance(make_linear(weight, None), PlainLinear)
    for quantization in Quantization:
        assert can_multiply(quantize(weight, quantization), DTYPE)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_a_decoder_is_built_without_c(gpu, is_batch_invariant):
    weights = Weights(
        *(EveryName(), DTYPE, gpu, lambda _, out: out.zero_(), None, None),
        is_batch_invariant=is_batch_invariant,
    )
    model = build_llama(CONFIG, weights)
    kind = OneTileLinear if is_batch_invariant else PlainLinear
    assert {type(layer.qkv) for layer in model.layers} == {kind}
    assert model.embedding.is_cuda


@pytest.mark.parametrize("name", reference.__all__)
def test_every_op_goes_to_triton(gpu, monkeypatch, name):
    monkeypatch.setattr(ops, "launcher", lambda twin: lambda *_, **__: twin.__name__)
    first = torch.zeros(2, 64, dtype=DTYPE, device=gpu)
    assert getattr(ops, name)(first) == name

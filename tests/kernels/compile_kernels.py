"""Compiles every launch of every launcher for a GPU that need not be there.

A program, not a test: Triton must be imported without TRITON_INTERPRET. Prints one JSON object
per launch: the kernel, the bytes of shared memory it takes, the bytes of its machine code.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from kernels import triton_ops
from tests.kernels.tensors import make_paged, make_quantized


def compile_launch(kernel, *args, grid, warmup, **constants):
    """Stands in for JITFunction.run: compiles for what the launcher would have launched."""
    del grid, warmup
    bound = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature, constexprs, attributes = {}, {}, {}
    for param in kernel.params:
        value = bound[param.name]
        free = not param.is_constexpr and not param.do_not_specialize
        is_one = free and isinstance(value, int) and value == 1
        if param.is_constexpr or is_one or value is None:
            signature[param.name] = "constexpr"
            constexprs[param.name] = value
        else:
            signature[param.name] = mangle_type(value)
            if free and is_divisible_by_16(value):
                attributes[param.num,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32))
    launch = {
        "kernel": kernel.fn.__name__,
        "shared_bytes": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
    }
    sys.stdout.write(json.dumps(launch) + "\n")


def is_divisible_by_16(value):
    """Whether Triton would tell the compiler so; torch aligns what it allocates."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def launch_all(dtype, num_heads, num_kv_heads, head_dim):
    """Call every launcher once, with a model's shapes."""
    hidden = num_heads * head_dim
    query = torch.zeros(4, num_heads, head_dim, dtype=dtype)
    key = torch.zeros(4, num_kv_heads, head_dim, dtype=dtype)
    x, weight = torch.zeros(4, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    paged = make_paged([40, 9], num_kv_heads, head_dim, 16, dtype, "cpu")
    ids = torch.zeros(4, dtype=torch.int64)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    triton_ops.store_kv(key, key, paged.key_cache, paged.value_cache, ids)
    triton_ops.paged_attention_decode(query[:2], *paged.args, 0.1)
    triton_ops.paged_attention_prefill(query, *paged.args, starts, 3, 0.1)
    options = {"window": 20, "softcap": 50.0, "sinks": torch.zeros(num_heads)}
    triton_ops.paged_attention_decode(query[:2], *paged.args, 0.1, **options)
    triton_ops.paged_attention_prefill(query, *paged.args, starts, 3, 0.1, **options)
    for stored in (torch.int8, torch.float8_e4m3fn):
        small = make_quantized([40, 9], num_kv_heads, head_dim, 16, stored, "cpu")
        triton_ops.store_kv(key, key, small.key_cache, small.value_cache, ids, **small.scales)
        triton_ops.paged_attention_decode(query[:2], *small.args, 0.1, **small.scales)
        triton_ops.paged_attention_prefill(query, *small.args, starts, 3, 0.1, **small.scales)
    triton_ops.copy_blocks(x, ids, ids)
    triton_ops.rms_norm(x, weight, 1e-5)
    triton_ops.rms_norm(query, weight[:head_dim], 1e-5)
    triton_ops.add_rms_norm(x, x, weight, 1e-5)
    triton_ops.rotary(query, key, torch.zeros(8, head_dim), ids)
    triton_ops.silu_mul(x)


CAPABILITY = int(sys.argv[1])
JITFunction.run = compile_launch
launch_all(getattr(torch, sys.argv[2]), *map(int, sys.argv[3:6]))

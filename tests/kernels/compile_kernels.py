"""Compiles launches of Triton's launchers for a GPU, which need not be there.

It is a program and not a test, because Triton must be imported without TRITON_INTERPRET. Takes the
capability, the dtype, a model's shape (query heads, kv heads, head dim), the block size, and which
attention: "plain", "options", "int8", "float8_e4m3fn"; "wide": of 512 dims; "shared": decodes that
share a prefix; or over latents as wide as DeepSeek's: "latent", "latent int8", "latent
float8_e4m3fn". "others" are all launchers but attention and its stores. Launches have the
configuration of that capability, and of a device with the most processors; so chunks are compiled
with their positions split, and whole. Prints one JSON object per kernel variant: its registers, the
bytes of a thread's stack, the bytes of shared memory and of machine code, its warps, and whether it
has wgmma instructions.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from kernels import ops, reference
from kernels.grouped_maps import GroupedMaps
from kernels.sequences import MAX_SHARED, Sequences, SharedPrefixes
from kernels.triton import configs as tuned
from kernels.triton.attention import decode, prefill
from kernels.triton.linear.tile_sizes import fewest_rows
from tests.kernels.tensors import make_paged, make_quantized

launchers = SimpleNamespace(
    **{name: ops.launcher(getattr(reference, name)) for name in reference.__all__}
)


def compile_launch(kernel, *args, grid, warmup, **constants):
    """Replaces JITFunction.run: compiles the kernel instead of launching it."""
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
    names = "num_warps", "num_stages", "enable_fp_fusion"
    options = {name: constants[name] for name in names if name in constants}
    variant = kernel.fn.__name__, str(signature), str(constexprs), str(attributes), str(options)
    if variant in VARIANTS:
        return
    VARIANTS.add(variant)
    source = ASTSource(kernel, signature, constexprs, attributes)
    target = GPUTarget("cuda", CAPABILITY, 32)
    compiled = triton.compile(source, target=target, options=options)
    registers, stack_bytes = resources(compiled.asm["cubin"])
    launch = {
        "kernel": kernel.fn.__name__,
        "triton": triton.__version__,
        "registers": registers,
        "stack_bytes": stack_bytes,
        "shared_bytes": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "cubin_bytes": len(compiled.asm["cubin"]),
        "has_wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
    }
    sys.stdout.write(json.dumps(launch) + "\n")


def resources(cubin):
    """Return registers per thread, and the bytes on its stack, to which it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
        code.write(cubin)
        code.flush()
        argv = [knobs.nvidia.cuobjdump.path, "-res-usage", code.name]
        report = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())


def is_divisible_by_16(value):
    """Whether Triton's compiler would assume this alignment; torch aligns its allocations."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def launch_attention(kind, dtype, num_heads, num_kv_heads, head_dim, block_size):
    """Store to a cache, and attend to it."""
    query = torch.zeros(4, num_heads, head_dim, dtype=dtype)
    key = torch.zeros(4, num_kv_heads, head_dim, dtype=dtype)
    shape = SEQ_LENS, num_kv_heads, head_dim, block_size
    ids = torch.zeros(4, dtype=torch.int64)
    paged, options = make_paged(*shape, dtype, "cpu"), {}
    if kind == "options":
        options = {"window": 1100, "softcap": 50.0, "sinks": torch.zeros(num_heads)}
    elif kind not in {"plain", "shared"}:
        paged = make_quantized(*shape, getattr(torch, kind), "cpu")
    caches = paged.key_cache, paged.value_cache
    if kind == "shared":
        launch_shared(query, paged)
        return
    launchers.store_kv(key, key, *caches, ids, **paged.scales)
    for rotated in {head_dim, head_dim * 3 // 8 * 2}:  # all dims, and three quarters
        cos_sin = torch.zeros(8, rotated)
        launchers.rotary_store_kv(query, key, key, cos_sin, ids, *caches, ids, **paged.scales)
    attend(query, paged, options | paged.scales)
    if kind == "plain":  # as it is for any batch
        out = torch.zeros_like(query)
        launch = prefill.prepare_prefill(query, *caches, 0.1, out=out, is_whole=True)
        starts = torch.tensor([0, 3, 4], dtype=torch.int32)
        launch(Sequences(paged.block_tables, paged.seq_lens, starts, 3))


def attend(query, paged, options):
    """Launch decodes; and chunks, with their positions split and whole."""
    launchers.paged_attention_decode(query[:2], *paged.args, 0.1, **options)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    caches, tables, lens = paged.args[:2], paged.block_tables, paged.seq_lens
    launchers.paged_attention_prefill(query, *caches, tables, lens, starts, 3, 0.1, **options)
    short = tables[:, :1]
    launchers.paged_attention_prefill(query, *caches, short, lens, starts, 3, 0.1, **options)


def launch_shared(query, paged):
    """Launch decodes that share a prefix."""
    shapes = 2, MAX_SHARED + 1, MAX_SHARED, 2
    shared = SharedPrefixes(*(torch.zeros(shape, dtype=torch.int32) for shape in shapes))
    caches, out = (paged.key_cache, paged.value_cache), torch.zeros_like(query)
    launch = decode.prepare_decode(query, *caches, 0.1, out=out)
    launch(Sequences(paged.block_tables, paged.seq_lens, shared=shared))


def launch_latent(stored, dtype, num_heads, block_size):
    """Store latents, and attend to them; `stored` is the dtype of the cache, or empty."""
    query = torch.zeros(4, num_heads, LATENT_DIM + 64, dtype=dtype)
    key = torch.zeros(4, 1, LATENT_DIM + 64, dtype=dtype)
    shape = SEQ_LENS, 1, LATENT_DIM + 64, block_size
    if stored:
        paged = make_quantized(*shape, getattr(torch, stored), "cpu").latent(LATENT_DIM)
    else:
        paged = make_paged(*shape, dtype, "cpu").latent(LATENT_DIM)
    ids = torch.zeros(4, dtype=torch.int64)
    launchers.store_kv(key, None, paged.key_cache, None, ids, key_scales=paged.key_scales)
    attend(query, paged, paged.scales)


def launch_others(dtype, num_heads, num_kv_heads, head_dim):
    """Call every other launcher without options once."""
    hidden = num_heads * head_dim
    query = torch.zeros(4, num_heads, head_dim, dtype=dtype)
    key = torch.zeros(4, num_kv_heads, head_dim, dtype=dtype)
    x, weight = torch.zeros(4, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    ids = torch.zeros(4, dtype=torch.int64)
    launchers.copy_blocks(x, ids, ids)
    launchers.rms_norm(x, weight, 1e-5)
    launchers.rms_norm(query, weight[:head_dim], 1e-5)
    launchers.add_rms_norm(x, x, weight, 1e-5)
    for rotated in {head_dim, head_dim * 3 // 8 * 2}:  # all dims, and three quarters
        launchers.rotary(query, key, torch.zeros(8, rotated), ids)
    launchers.rms_norm(x, weight.float(), 1e-5)
    launchers.rms_norm(query, weight[:head_dim].float(), 1e-5)
    launchers.add_rms_norm(x, x, weight.float(), 1e-5)
    launchers.silu_mul(x)
    launchers.tanh_gelu_mul(x)
    launchers.clamped_swiglu(x, 1.702, 7.0)
    launchers.linear(x, torch.zeros(64, hidden, dtype=dtype), weight[:64])
    launchers.suppress(torch.zeros(4, 4096), ids, torch.zeros(4, 128, dtype=torch.int32))
    launchers.greedy(torch.zeros(4, 150_000, dtype=dtype))
    numbers = torch.ones(4)
    for num_tokens in (150_000, 262_208):  # the last is that of Gemma 3
        logits = torch.zeros(4, num_tokens)
        launchers.sample(logits, numbers, ids, numbers.double(), numbers, ids, ids)


def launch_quantized_linear(dtype):
    """Each kind of weight in each tile; activations of 32 bits keep their weights dequantized."""
    dtype = dtype if dtype.itemsize == 2 else torch.float16
    for num_rows in fewest_rows():
        x = torch.zeros(num_rows, 4096, dtype=dtype)
        scales = torch.zeros(128, 64, dtype=torch.float16)
        nibbles = torch.zeros(2048, 64, dtype=torch.uint8)
        launchers.quantized_linear(x, nibbles, scales, scales, x[0, :64])
        launchers.quantized_linear(x, nibbles, scales.to(torch.uint8), None, x[0, :64])
        for stored in (torch.int8, torch.float8_e4m3fn):
            values = torch.zeros(4096, 64).to(stored)
            launchers.quantized_linear(x, values, scales[:1].float(), None, None)


def launch_grouped_linear(dtype):
    """Experts, and both maps of LoRA adapters, in each tile."""
    ends = torch.zeros(8, dtype=torch.int32)
    for num_rows in fewest_rows(8):
        x, rows = torch.zeros(num_rows, 4096, dtype=dtype), torch.zeros(num_rows, dtype=torch.int64)
        maps = GroupedMaps.of([torch.zeros(64, 4096, dtype=dtype)] * 8)
        launchers.grouped_linear(x, maps, ends, rows, None, num_rows, None)
        with_biases = replace(maps, biases=torch.zeros(8, 64, dtype=dtype))
        launchers.grouped_linear(x, with_biases, ends, rows, None, num_rows, None)
        maps = replace(maps, num_in=64, num_out=4096, is_by_input=True)
        launchers.grouped_linear(x[:, :64], maps, ends, None, rows, num_rows, x)


def launch_grouped_quantized_linear(dtype):
    """Quantized experts of each kind, as both maps of an expert, in each tile."""
    dtype = dtype if dtype.itemsize == 2 else torch.float16
    ends = torch.zeros(8, dtype=torch.int32)
    scales = torch.zeros(8, 128, 64, dtype=torch.float16)
    nibbles = torch.zeros(8, 2048, 64, dtype=torch.uint8)
    for num_rows in fewest_rows(8):
        x, rows = torch.zeros(num_rows, 4096, dtype=dtype), torch.zeros(num_rows, dtype=torch.int64)
        weights = [(nibbles, scales, scales)]
        for stored in (torch.int8, torch.float8_e4m3fn):
            values = torch.zeros(8, 4096, 64, dtype=torch.int8).to(stored)
            weights.append((values, scales[:, :1].float().contiguous(), None))
        for weight in weights:
            launchers.grouped_quantized_linear(x, *weight, ends, rows, None, num_rows)
            launchers.grouped_quantized_linear(x, *weight, ends, None, rows, num_rows)
        mxfp4, bias = (nibbles, scales.to(torch.uint8), None), torch.zeros(8, 64, dtype=dtype)
        launchers.grouped_quantized_linear(x, *mxfp4, ends, rows, None, num_rows, bias=bias)
        launchers.grouped_quantized_linear(x, *mxfp4, ends, None, rows, num_rows, bias=bias)


def main():
    dtype, (num_heads, num_kv_heads, head_dim, block_size) = sys.argv[2], map(int, sys.argv[3:7])
    dtype = getattr(torch, dtype)
    for kind in sys.argv[7:]:
        if kind == "others":
            launch_others(dtype, num_heads, num_kv_heads, head_dim)
            launch_quantized_linear(dtype)
            launch_grouped_linear(dtype)
            launch_grouped_quantized_linear(dtype)
        elif kind.startswith("latent"):
            launch_latent(kind.removeprefix("latent").strip(), dtype, num_heads, block_size)
        elif kind == "wide":
            launch_attention("plain", dtype, 16, 8, 512, block_size)
        else:
            launch_attention(kind, dtype, num_heads, num_kv_heads, head_dim, block_size)


LATENT_DIM = 512
SEQ_LENS = [1200, 9]
VARIANTS = set()
CAPABILITY = int(sys.argv[1])
PROCESSORS = {80: 108, 86: 84, 90: 132}[CAPABILITY]
decode.num_processors = prefill.num_processors = lambda _: PROCESSORS
JITFunction.run = compile_launch
tuned._device_path = lambda _: tuned.config_path("no such device", divmod(CAPABILITY, 10))
main()

"""Every native op under one module, as `kernels.reference` has every twin."""

from kernels.cpu.ops.activation import silu_mul
from kernels.cpu.ops.attention import paged_attention_decode, paged_attention_prefill
from kernels.cpu.ops.norm import add_rms_norm, rms_norm
from kernels.cpu.ops.rotary import rotary
from kernels.cpu.ops.rotary_store import rotary_store_kv
from kernels.cpu.ops.store import store_kv
from kernels.cpu.ops.suppress import suppress
from kernels.reference import copy_blocks, gather_blocks, sample, scatter_blocks

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "gather_blocks",
    "paged_attention_decode",
    "paged_attention_prefill",
    "rms_norm",
    "rotary",
    "rotary_store_kv",
    "sample",
    "scatter_blocks",
    "silu_mul",
    "store_kv",
    "suppress",
]

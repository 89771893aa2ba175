"""Every Triton launcher under one module, as `kernels.reference` has every twin."""

from kernels.triton.activation import silu_mul
from kernels.triton.copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.triton.decode import paged_attention_decode
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.prefill import paged_attention_prefill
from kernels.triton.rotary import rotary
from kernels.triton.rotary_store import rotary_store_kv
from kernels.triton.sample import sample
from kernels.triton.store import store_kv
from kernels.triton.suppress import suppress

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

"""Every Triton launcher under one module, as `kernels.reference` has every twin."""

from kernels.activation import silu_mul
from kernels.copy import copy_blocks
from kernels.decode import paged_attention_decode
from kernels.norm import add_rms_norm, rms_norm
from kernels.prefill import paged_attention_prefill
from kernels.rotary import rotary
from kernels.store import store_kv

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "paged_attention_decode",
    "paged_attention_prefill",
    "rms_norm",
    "rotary",
    "silu_mul",
    "store_kv",
]

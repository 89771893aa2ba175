"""Every Triton launcher under one module, as `kernels.reference` has every twin."""

from kernels.activation import silu_mul
from kernels.copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.decode import paged_attention_decode
from kernels.norm import add_rms_norm, rms_norm
from kernels.prefill import paged_attention_prefill
from kernels.rotary import rotary
from kernels.rotary_store import rotary_store_kv
from kernels.sample import sample
from kernels.store import store_kv
from kernels.suppress import suppress

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

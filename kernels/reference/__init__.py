"""The kernels' *twins*: torch functions that define the results, and run where no kernel can.

Each twin has the name and signature of its Triton launcher in `kernels.triton`.
"""

from kernels.reference.activation import clamped_swiglu, silu_mul, tanh_gelu_mul
from kernels.reference.attention.decode import paged_attention_decode
from kernels.reference.attention.prefill import paged_attention_prefill
from kernels.reference.copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.reference.greedy import greedy
from kernels.reference.linear.grouped import grouped_linear
from kernels.reference.linear.grouped_quantized import grouped_quantized_linear
from kernels.reference.linear.plain import linear
from kernels.reference.linear.quantized import quantized_linear
from kernels.reference.norm import add_rms_norm, rms_norm
from kernels.reference.rotary import rotary
from kernels.reference.rotary_store import rotary_store_kv
from kernels.reference.sample import sample
from kernels.reference.store import store_kv
from kernels.reference.suppress import suppress

__all__ = [
    "add_rms_norm",
    "clamped_swiglu",
    "copy_blocks",
    "gather_blocks",
    "greedy",
    "grouped_linear",
    "grouped_quantized_linear",
    "linear",
    "paged_attention_decode",
    "paged_attention_prefill",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "rotary_store_kv",
    "sample",
    "scatter_blocks",
    "silu_mul",
    "store_kv",
    "suppress",
    "tanh_gelu_mul",
]

"""Triton kernels, each with a plain-torch twin in `kernels.reference`.

Call them through `kernels.ops`, which runs the Triton launcher for CUDA tensors and the twin for
all others. One kernel is four things: the math in its docstring, a launcher that checks,
allocates and launches, the twin of the same signature, and a test that compares the two.

The KV pool is block-major: a layer's key or value cache is a view [num_blocks, block_size,
num_kv_heads, head_dim] whose blocks lie far apart, so kernels take strides and compute offsets
in int64. A slot is `block * block_size + offset`; `PAD_SLOT` marks a token that is not stored.
No launcher waits for the device, reads a device value or sizes its grid by one: all of them can
be captured in a CUDA graph.
"""

from typing import Final

__version__ = "0.0.0"  # some transformers releases probe for a package of this name

PAD_SLOT: Final = -1

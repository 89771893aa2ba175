"""Triton kernels, each with a plain-torch twin in `kernels.reference`.

Call them through `kernels.ops`, which runs the Triton launcher for CUDA tensors, the native code of
`kernels.cpu` for those on a CPU, and the twin for all others. One kernel is four things: the math
in its docstring, a launcher that checks, allocates and launches, the twin of the same signature,
and a test that compares the two.

The KV pool is block-major: a layer's key or value cache is a view [num_blocks, block_size,
num_kv_heads, head_dim] whose blocks lie far apart, so kernels take strides and compute offsets
in int64. A slot is `block * block_size + offset`; `PAD_SLOT` marks a token that is not stored.
No launcher waits for the device, reads a device value or sizes its grid by one: all of them can
be captured in a CUDA graph.

Results do not depend on the batch: neither tile sizes nor splits follow from how many sequences
or tokens a launch has, only from a sequence's own length, the dtype, the model's shape and the
device's configuration (`kernels.tuning.configs`).

On a machine without a GPU the tests run the kernels in Triton's interpreter, which needs
`TRITON_INTERPRET=1` before anything imports Triton, and compile them for devices that are absent.
The interpreter of Triton 3.6 fails with numpy 2.4 and later; the kernels themselves do not.
"""

from typing import Final

__version__ = "0.0.0"  # some transformers releases probe for a package of this name

PAD_SLOT: Final = -1

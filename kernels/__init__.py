"""Device code: Triton kernels for GPUs, C kernels for CPUs, and plain-torch twins of kernels.

A *twin* is a torch function that defines a kernel's result (`kernels.reference`). A *launcher* is
the Python function that checks the arguments of a Triton kernel, allocates the result and launches
the kernel. Call kernels through `kernels.ops`, which runs the launcher for CUDA tensors, C
(`kernels.cpu`) for CPU tensors, and the twin in all other cases. A Triton kernel consists of four
things: the math in its docstring, a launcher, a twin with the launcher's signature, and a test that
compares kernel and twin (docs/write-a-kernel.md).

The KV pool is block-major: a block holds the keys and values of several layers. So one layer's key
or value cache is a view [num_blocks, block_size, num_kv_heads, head_dim] whose blocks lie far
apart. So kernels take strides, and compute the offsets of elements in int64. A *slot* is the index
of a token's KV in a cache: `block * block_size + i`, where i is the token's index in the block.
`PAD_SLOT` marks a token whose KV is not stored.

No launcher waits for the device, and none reads a value from the device to size its grid. So all
launches can be captured in a CUDA graph.

A token's result does not depend on the other sequences of its batch. The sizes of tiles, and of the
parts into which a sequence's positions are split, follow from the sequence's length, the dtype, the
model's shape and the device's configuration (`kernels.triton.configs`). On a GPU there are four
exceptions, in which the batch changes the last bits of results:

- Prefill attention splits positions if the launch has too few tokens to fill the GPU.
- Decoding sequences may attend together to a prefix that they share (`Sequences.shared`).
- The kernels for quantized linear maps and for `kernels.grouped_maps` choose tiles by the number of
  input rows (`kernels.triton.linear.tile_sizes`).
- torch's matrix products add in an order that depends on the number of input rows.

On a machine without a GPU, the tests compile the Triton kernels for GPUs, and run them in Triton's
interpreter. The interpreter needs `TRITON_INTERPRET=1` before the first import of Triton. The
interpreter of Triton 3.6 fails with numpy 2.4 and later; the kernels themselves do not.
"""

from typing import Final

__version__ = "0.0.0"  # some transformers releases probe for a package of this name

PAD_SLOT: Final = -1

"""Kernels in C for CPUs, called through ctypes.

`build` compiles the sources in `src`, for this CPU or for one of the kinds of CPU in `targets`.
`library` loads the compiled library, whose kernels run in torch's thread pool; `ops` checks tensors
and calls the kernels. `linear` has linear maps with packed weights, and `program` runs all layers
of a decoder in one call. `amx_choice` decides which kernels use Intel's AMX, by the trials in
`amx_trials`. `python -m kernels.cpu` compiles the sources ahead of time.
"""

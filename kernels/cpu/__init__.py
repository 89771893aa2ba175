"""Kernels in C for CPUs, called through ctypes.

`build` compiles the sources in `src` for the machine that runs them, or for one of the kinds of CPU
in `targets`. `library` loads the result into torch's thread pool, `ops` checks tensors and calls
it, `linear` has linear maps with packed weights, and `program` runs all layers of a decoder in one
call. `amx_choice` decides what uses Intel's AMX, by the trials in `amx_trials`. `python -m
kernels.cpu` compiles ahead of time.
"""

"""Native CPU kernels: C, compiled on the machine that runs them, called through ctypes.

Each op has the signature of its twin in `kernels.reference` and gives the same to rounding. Where
there is no compiler, or a dtype that no C was written for, the twin runs in its place.

`build` compiles the sources in `src`, `library` loads the result into torch's thread pool, and the
other modules check tensors and call it. `python -m kernels.cpu` compiles ahead of time.
"""

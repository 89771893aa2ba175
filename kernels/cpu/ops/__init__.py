"""The kernels in C, one module each; `kernels.reference` says what each computes."""

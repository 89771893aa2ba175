"""Triton kernels for linear maps."""

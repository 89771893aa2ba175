"""Ops as Triton kernels; `kernels.reference` has each of these ops in plain torch."""

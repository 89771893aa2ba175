"""Triton kernels, each with a plain-torch twin in `kernels.reference`."""

__version__ = "0.0.0"  # some transformers releases probe for a package of this name

"""The Triton kernels, each with a twin in `kernels.reference`."""

"""The kernels in plain torch: same names, same signatures, run on any device."""

"""Measures configurations of attention on a GPU, and finds the fastest for a model's shape."""

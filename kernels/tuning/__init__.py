"""Measures kernel configurations on a GPU, and finds the best one for a launch."""

"""Generates the reference of flags, metrics, RPCs and HTTP routes from the code."""

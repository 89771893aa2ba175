"""Copies prefixes from other workers and from the far tier."""

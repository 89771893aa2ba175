"""Moves blocks together, and changes the size of a pool."""

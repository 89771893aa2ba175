"""Reads the state of a core, without changing it: blocks, sequences, load, and progress."""

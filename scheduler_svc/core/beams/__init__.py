"""Beam search in the block space."""

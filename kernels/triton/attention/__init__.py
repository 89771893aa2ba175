"""Attention to the paged cache."""

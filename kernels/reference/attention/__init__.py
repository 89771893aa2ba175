"""Attention to the paged cache, in plain torch."""

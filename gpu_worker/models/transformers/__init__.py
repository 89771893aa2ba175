"""Decoders that the `transformers` library builds, on paged attention and states in blocks."""

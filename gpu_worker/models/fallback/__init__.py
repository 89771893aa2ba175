"""Decoders of `transformers` that have no implementation of ours, over paged attention."""

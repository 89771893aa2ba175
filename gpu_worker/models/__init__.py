"""Decoders: our own, and those that `transformers` builds."""

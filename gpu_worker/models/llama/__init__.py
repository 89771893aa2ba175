"""Llama-shaped decoders."""

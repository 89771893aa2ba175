"""Decoders with layer norms: GPT-NeoX, Nemotron, StableLM and StarCoder 2."""

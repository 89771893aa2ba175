"""Codecs of KV in the lower tiers: none, lossless compression, or quantization."""

"""Codecs of KV in the host tier and the disk tier: none, lossless compression, or quantization."""

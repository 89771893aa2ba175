"""Finds a model's files: in a directory, a GGUF file, on the hub, or in a bucket."""

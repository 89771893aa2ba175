"""Writes a model as a checkpoint of 4- or 8-bit integers, fitted to a text: `quire quantize`."""

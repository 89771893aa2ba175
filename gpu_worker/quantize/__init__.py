"""`quire quantize`: rounds a model's weights to 4- or 8-bit integers, and writes a checkpoint."""

"""How the lower tiers encode KV: as it is, compressed, or quantized."""

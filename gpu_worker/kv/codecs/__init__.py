"""How the lower tiers hold KV: as it is, compressed, or in fewer bits."""

"""The prefix cache: names of blocks, order of eviction, pins."""

"""Block space: the pools of blocks, KV groups, the order of eviction, pins."""

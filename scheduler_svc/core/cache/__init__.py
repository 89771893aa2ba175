"""Parts of the prefix cache: the order of eviction, and pins."""

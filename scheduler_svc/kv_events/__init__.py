"""KV events: which blocks each worker's prefix cache has, as snapshots and changes."""

"""A worker's KV memory: pools of blocks on device, host and disk, and moves between them."""

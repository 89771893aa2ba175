"""Which scheduler is the newest, and whether a peer still lives: epochs and heartbeats."""

"""One request from its admission to its last event."""

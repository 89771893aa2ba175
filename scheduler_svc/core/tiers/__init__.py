"""KV below the device: host and disk."""

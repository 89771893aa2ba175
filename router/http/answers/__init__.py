"""The JSON and server-sent events that answer requests."""

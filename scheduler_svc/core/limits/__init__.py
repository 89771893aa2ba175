"""Limits on the requests that a core accepts, and on the sequences that run at once."""

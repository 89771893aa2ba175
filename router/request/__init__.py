"""Requests, from admission to the last event."""

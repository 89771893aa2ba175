"""Turns: stored calls, which the service completes even if all its processes die and restart."""

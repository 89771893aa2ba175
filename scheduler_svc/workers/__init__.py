"""Attaches the workers, runs a session of steps with each worker, and places requests."""

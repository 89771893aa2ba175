"""The workers: attaches them, runs a session of steps with each, and places requests."""

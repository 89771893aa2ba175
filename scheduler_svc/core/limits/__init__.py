"""Limits on accepted requests, on the time of a step, and on running sequences."""

"""Turns: stored calls that are completed even if all processes die in between."""

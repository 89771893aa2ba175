"""Turns: stored calls, which are completed even if all processes die before that."""

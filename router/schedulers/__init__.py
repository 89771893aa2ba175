"""Connections to schedulers, and the choice of a scheduler for each request."""

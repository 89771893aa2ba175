"""Snapshots of a core for people and metrics."""

"""Asynchronous streams and tasks."""

"""Logs, traces and timelines of a process."""

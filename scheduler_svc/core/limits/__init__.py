"""Limits: which requests are accepted, how long a step takes, how many sequences run."""

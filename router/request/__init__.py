"""Requests, from validation to their submission."""

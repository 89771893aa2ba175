"""Turns that are kept: accepted once, computed to the end whatever dies."""

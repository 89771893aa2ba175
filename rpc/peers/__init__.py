"""Finds other processes and connects to them."""

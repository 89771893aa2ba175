"""Passes requests and blocks from one scheduler core to another: moves, and takeover."""

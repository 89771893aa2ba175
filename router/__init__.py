"""Accepts requests: text in, streamed text out; knows no block and no torch."""

"""Decoding where a step brings several tokens."""

"""Beam search, and the rows and blocks of its beams."""

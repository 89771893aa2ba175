"""Speculative decoding: guesses tokens ahead, and verifies them in one step."""

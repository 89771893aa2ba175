"""The workers: one engine and one scheduler core for each."""

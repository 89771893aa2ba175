"""The router service: turns text into tokens, and tokens from schedulers into streams of text."""

"""One live request: its events, its outputs, and what it used."""

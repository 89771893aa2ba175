"""Prefixes that come from other workers, or from the far tier."""

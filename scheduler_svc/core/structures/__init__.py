"""Data structures that know nothing of scheduling."""

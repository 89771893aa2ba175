"""The schedulers that a router sends requests to."""

"""Operators' calls: adapters and models of all schedulers, this router's requests, usage."""

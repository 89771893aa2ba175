"""Calls of operators: adapters and models on all schedulers, and the live requests here."""

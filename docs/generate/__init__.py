"""Writes the reference: every flag, metric, RPC and HTTP route, from the code that has them."""

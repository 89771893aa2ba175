"""Metrics, spans and logs of the steps."""

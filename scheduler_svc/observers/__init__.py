"""Observers of the workers' steps and sequences: metrics, spans and logs."""

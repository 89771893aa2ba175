"""Observers of the workers' steps and sequences: metrics, spans, the step log and watches."""

"""Decoders that the worker runs natively."""

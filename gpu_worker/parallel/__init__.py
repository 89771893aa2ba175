"""Runs one model on several devices, in one process per device; all execute the same steps."""

"""Reads checkpoints, and keeps linear maps in the form that a device multiplies fastest."""

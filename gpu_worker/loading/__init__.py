"""Loads a model onto a device, and builds the executor of its steps."""

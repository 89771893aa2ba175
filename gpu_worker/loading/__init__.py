"""Loads a model onto a device, and builds what executes its steps."""

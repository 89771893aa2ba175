"""Executes model steps on one device and owns its KV memory."""

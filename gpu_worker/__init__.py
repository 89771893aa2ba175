"""The worker: runs a model's steps on one or several devices, and owns the KV memory."""

"""The processes of a model on several devices: one per device, and all execute the same steps."""

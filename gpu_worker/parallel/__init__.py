"""One model on several devices: one process per device; all execute the same steps."""

"""One model on several devices: a process for each, which all execute the same steps."""

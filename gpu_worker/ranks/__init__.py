"""The ranks of a model on several devices: what each holds, and their exchanges in a step."""

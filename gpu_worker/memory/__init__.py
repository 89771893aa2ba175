"""The memory of a device and its host: its size, its use, and when it is short."""

"""The memory of a device and its host: sizes, use, copies, and when memory is short."""

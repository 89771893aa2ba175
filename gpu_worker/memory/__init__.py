"""The memory of a device and its host: how much there is, who gets it, and when it is short."""

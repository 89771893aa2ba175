"""A simulated worker: the real protocol and block accounting, without a model or a device."""

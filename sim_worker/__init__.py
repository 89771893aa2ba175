"""A worker without a device: the real protocol and block accounting, modelled time, no model."""

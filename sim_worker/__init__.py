"""A worker without a device: real protocol and block accounting, modelled time, no model."""

"""Protobuf to and from the values of `contract`; sizes are checked before work is done."""

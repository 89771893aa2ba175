"""Converts the values of `contract` to protobuf and back; sizes are checked before parsing."""

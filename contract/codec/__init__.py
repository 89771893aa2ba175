"""Converts the values of `contract` to protobuf and back."""

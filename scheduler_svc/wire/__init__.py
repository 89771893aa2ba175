"""Converts protobuf messages of `quire.v1` to the scheduler's types and back."""

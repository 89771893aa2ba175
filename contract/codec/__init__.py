"""Protobuf to and from the values of the contract; bounds are checked before work is done."""

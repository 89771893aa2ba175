"""The data types that several processes share: one class each, with its limits and its codec.

Every package may import this one. It imports nothing of Quire but the generated stubs, and those
only in `contract.codec`, which turns values into protobuf and back.
"""

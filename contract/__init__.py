"""The data types that several processes share: one class each, with its limits and its codec.

Every package may import this one. Of Quire, this package imports only the generated stubs, and only
in `contract.codec`, which turns values into protobuf and back.
"""

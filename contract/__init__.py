"""The data types that several processes share: one class each, with its limits and its codec.

It imports nothing of ours but the generated stubs, and those only in `contract.codec`, which turns
values into protobuf and back. Everybody may import it.
"""

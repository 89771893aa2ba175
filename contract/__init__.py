"""Data types that several processes share: their fields, limits, and conversion to protobuf.

Every package may import `contract`. `contract` imports only one package of Quire, the protobuf
stubs in `quire.v1`. Only `contract.codec` imports the stubs, to convert values to protobuf and
back.
"""

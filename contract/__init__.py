"""The data types that several processes share, with the limits of their values and their codecs.

Every package may import this one. Of Quire, this package imports only the generated stubs, and only
in `contract.codec`, which turns values into protobuf and back.
"""

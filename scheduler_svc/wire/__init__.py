"""Between the messages of `quire.v1` and our own types; only here protobuf is taken apart."""

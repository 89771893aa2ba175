"""Values of `contract` to protobuf and back; the fields have the same names on both sides."""

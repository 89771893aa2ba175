"""The gRPC services of a worker, and the parsing of their messages."""

"""The gRPC API."""

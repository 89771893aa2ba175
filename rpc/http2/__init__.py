"""A gRPC server on asyncio; a connection sends all messages of one event loop turn in one write."""

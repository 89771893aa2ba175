"""A gRPC server on asyncio; messages of one turn of the event loop leave in one write."""

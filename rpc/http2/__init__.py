"""A gRPC server on asyncio that sends all messages of one moment in one write."""

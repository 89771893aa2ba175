"""The gRPC services of a worker, and the messages that they read and write."""

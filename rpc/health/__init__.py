"""Whether a process is alive and ready, told by gRPC and HTTP."""

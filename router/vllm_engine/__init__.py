"""The engine contract of the Shepherd Model Gateway, `vllm.grpc.engine.VllmEngine`."""

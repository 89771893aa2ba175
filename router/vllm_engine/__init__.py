"""The Shepherd Model Gateway's API for engines, `vllm.grpc.engine.VllmEngine`."""

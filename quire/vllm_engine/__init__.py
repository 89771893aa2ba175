"""Stubs of SMG's engine contract, generated from protos/quire/vllm_engine by `make protos`."""

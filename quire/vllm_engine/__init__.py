"""Stubs of the API with which the gateway SMG calls vLLM.

`make protos` generates them from protos/quire/vllm_engine.
"""

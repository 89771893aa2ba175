"""Stubs of the API with which the Shepherd Model Gateway (SMG) calls vLLM.

`make protos` generates them from protos/quire/vllm_engine.
"""

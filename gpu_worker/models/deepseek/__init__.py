"""Decoders with multi-head latent attention: DeepSeek V2, V3 and models with the same layers."""

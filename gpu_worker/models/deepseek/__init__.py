"""Decoders with multi-head latent attention: DeepSeek V2 and V3 and families of their shape."""

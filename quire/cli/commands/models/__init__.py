"""Commands for models and adapters: load, unload, quantize."""

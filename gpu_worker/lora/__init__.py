"""LoRA adapters: read from disk, and added to a model's linear maps."""

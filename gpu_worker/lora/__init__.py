"""LoRA adapters: what is read of them, and what they add to a model's linear maps."""

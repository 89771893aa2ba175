"""What operators have the workers do: LoRA adapters and whole models, loaded and unloaded."""

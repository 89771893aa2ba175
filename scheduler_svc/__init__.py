"""The scheduler service: owns sequences and KV blocks, and plans every step of the workers."""

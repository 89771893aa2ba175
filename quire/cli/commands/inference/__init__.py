"""Commands that ask the model: one prompt, a conversation, a file of requests."""

"""Commands that use the model: for one prompt, a conversation, vectors or a file of requests."""
